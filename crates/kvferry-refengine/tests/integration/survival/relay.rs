//! A relay in front of an agent that forwards, holds, resets, or flips a byte.

use kvferry_sys::sync::Mutex;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

pub(crate) struct Relay {
    pub(crate) address: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    target: Mutex<String>,
    /// Nothing passes, in either direction, on any connection.
    held: AtomicBool,
    /// Hold what passes back on data connections.
    held_data: AtomicBool,
    /// Bytes to pass back on data connections before one is flipped; `usize::MAX` for never.
    flip_in: AtomicUsize,
    /// Whether each carries data.
    open: Mutex<Vec<(TcpStream, Arc<AtomicBool>)>>,
    ended: AtomicBool,
}

impl Relay {
    /// A relay without a target yet.
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let state = Arc::new(State::default());
        state.flip_in.store(usize::MAX, Ordering::SeqCst);
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                shared.connect(near);
            }
        });
        Self { address, state }
    }

    pub(crate) fn to(&self, target: &str) {
        target.clone_into(&mut self.state.target.lock());
    }

    pub(crate) fn hold(&self, on: bool) {
        self.state.held.store(on, Ordering::SeqCst);
    }

    pub(crate) fn hold_data(&self, on: bool) {
        self.state.held_data.store(on, Ordering::SeqCst);
    }

    /// Ends all connections; new ones are served.
    pub(crate) fn cut(&self) {
        self.state.cut(|_| true);
    }

    /// Ends all data connections.
    pub(crate) fn cut_data(&self) {
        self.state.cut(|is_data| is_data);
    }

    /// Flips a bit on data connections towards the client, after this many more bytes.
    pub(crate) fn flip_after(&self, bytes: usize) {
        self.state.flip_in.store(bytes, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        self.hold(false);
        self.hold_data(false);
        self.cut();
        drop(TcpStream::connect(&self.address));
    }
}

impl State {
    fn cut(&self, which: impl Fn(bool) -> bool) {
        let mut open = self.open.lock();
        for (stream, _) in open.extract_if(.., |(_, data)| which(data.load(Ordering::SeqCst))) {
            drop(stream.shutdown(Shutdown::Both));
        }
    }

    fn connect(self: &Arc<Self>, near: TcpStream) {
        let target = self.target.lock().clone();
        let Ok(far) = TcpStream::connect(&target) else { return };
        let clones = (near.try_clone(), far.try_clone(), near.try_clone(), far.try_clone());
        let (Ok(a), Ok(b), Ok(c), Ok(d)) = clones else { return };
        let is_data = Arc::new(AtomicBool::new(false));
        let both = [a, b].map(|stream| (stream, Arc::clone(&is_data)));
        self.open.lock().extend(both);
        for (from, to, back) in [(near, d, false), (far, c, true)] {
            let (state, is_data) = (Arc::clone(self), Arc::clone(&is_data));
            thread::spawn(move || state.pump(from, to, back, &is_data));
        }
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, back: bool, is_data: &AtomicBool) {
        let mut buffer = vec![0; 64 * 1024];
        let mut passed = 0;
        while let Ok(n) = from.read(&mut buffer) {
            if n == 0 {
                break;
            }
            if !back && passed == 0 {
                // The first message of a data connection names a stream.
                let names = buffer[..n].windows(12).any(|bytes| bytes == b"stream_hello");
                is_data.store(names, Ordering::SeqCst);
            }
            let data = back && is_data.load(Ordering::SeqCst);
            while self.held.load(Ordering::SeqCst)
                || (data && self.held_data.load(Ordering::SeqCst))
            {
                thread::sleep(Duration::from_millis(1));
            }
            if data {
                self.flip(&mut buffer[..n]);
            }
            passed += n;
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        drop(to.shutdown(Shutdown::Both));
        drop(from.shutdown(Shutdown::Both));
    }

    fn flip(&self, bytes: &mut [u8]) {
        let left = self.flip_in.load(Ordering::SeqCst);
        if left == usize::MAX {
            return;
        }
        if left < bytes.len() {
            bytes[left] ^= 0x10;
            self.flip_in.store(usize::MAX, Ordering::SeqCst);
        } else {
            self.flip_in.store(left - bytes.len(), Ordering::SeqCst);
        }
    }
}
