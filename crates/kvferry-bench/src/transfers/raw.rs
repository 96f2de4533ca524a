//! Raw TCP streams, one or several: a mebibyte per call, and one byte back at the end.

use kvferry_sys::sync::Mutex;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::pages::Pages;

/// Bytes of one measurement.
pub(super) const STREAM_BYTES: usize = 256 << 20;

const CALL_BYTES: usize = 1 << 20;

/// Sends `payload` and waits for the byte that acknowledges all of it.
pub(super) fn send(stream: &mut TcpStream, payload: &[u8]) -> io::Result<Duration> {
    let started = Instant::now();
    stream.write_all(&(payload.len() as u64).to_le_bytes())?;
    for call in payload.chunks(CALL_BYTES) {
        stream.write_all(call)?;
    }
    stream.read_exact(&mut [0])?;
    Ok(started.elapsed())
}

/// Sends equal shares of `payload` over all streams at once.
pub(super) fn send_over(streams: &mut [TcpStream], payload: &[u8]) -> io::Result<Duration> {
    let share = payload.len().div_ceil(streams.len());
    let started = Instant::now();
    std::thread::scope(|scope| {
        let senders: Vec<_> = streams
            .iter_mut()
            .zip(payload.chunks(share))
            .map(|(stream, share)| scope.spawn(|| send(stream, share)))
            .collect();
        senders.into_iter().try_for_each(|sender| sender.join().expect("no panic").map(drop))
    })?;
    Ok(started.elapsed())
}

/// Receives such streams into `memory` until the sender closes.
pub(super) fn serve(mut stream: TcpStream, memory: &Mutex<Pages>) -> io::Result<()> {
    loop {
        let mut len = [0; 8];
        if stream.read(&mut len[..1])? == 0 {
            return Ok(());
        }
        stream.read_exact(&mut len[1..])?;
        let mut memory = memory.lock();
        let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|&len| len <= memory.len());
        let Some(len) = len else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a raw stream is too long"));
        };
        let mut rest = &mut memory[..len];
        while !rest.is_empty() {
            let call = rest.len().min(CALL_BYTES);
            match stream.read(&mut rest[..call])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got => rest = &mut rest[got..],
            }
        }
        stream.write_all(&[1])?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_raw_stream_arrives_whole_and_one_beyond_the_memory_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let mut sender =
            TcpStream::connect(listener.local_addr().expect("bound")).expect("listens");
        let receiver = listener.accept().expect("connected").0;
        let memory = Mutex::new(Pages::filled(0, 3 << 20));
        let payload: Vec<u8> = (0..(3 << 20) - 5).map(|i| (i % 251) as u8).collect();
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| serve(receiver, &memory));
            send(&mut sender, &payload).expect("fits");
            send(&mut sender, &payload).expect("fits again");
            send(&mut sender, &vec![0; 4 << 20]).expect_err("too long");
            assert!(serving.join().expect("no panic").is_err());
        });
        assert_eq!(memory.into_inner()[..payload.len()], payload);
    }
}
