//! Vectors of borrowed buffers and spans, for protocols that put heads between payloads.

use crate::socket::{SPANS_MAX, Socket};
use crate::span::HostSpan;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Entries in the layout of the kernel's vectored calls, [`SPANS_MAX`] at most.
struct Entries {
    entries: [MaybeUninit<libc::iovec>; SPANS_MAX],
    count: usize,
    bytes: usize,
}

impl Entries {
    const fn new() -> Self {
        Self { entries: [MaybeUninit::uninit(); SPANS_MAX], count: 0, bytes: 0 }
    }

    fn push(&mut self, entry: libc::iovec) -> bool {
        if self.count == SPANS_MAX {
            return false;
        }
        self.entries[self.count].write(entry);
        self.count += 1;
        self.bytes += entry.iov_len;
        true
    }

    fn as_slice(&self) -> &[libc::iovec] {
        // SAFETY: the first `count` entries were written by `push`.
        unsafe { std::slice::from_raw_parts(self.entries.as_ptr().cast(), self.count) }
    }
}

/// Spans, and buffers that are borrowed as `B`, for one call.
pub struct Vector<B> {
    entries: Entries,
    borrowed: PhantomData<B>,
}

/// Buffers and spans to be sent in one call.
pub type SendVector<'a> = Vector<&'a [u8]>;

/// Buffers and spans to be received into in one call.
pub type RecvVector<'a> = Vector<&'a mut [u8]>;

impl<B> fmt::Debug for Vector<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vector[{} entries, {} bytes]", self.entries.count, self.entries.bytes)
    }
}

impl<B> Default for Vector<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B> Vector<B> {
    /// An empty vector.
    pub const fn new() -> Self {
        Self { entries: Entries::new(), borrowed: PhantomData }
    }

    /// Bytes in the vector.
    pub const fn bytes(&self) -> usize {
        self.entries.bytes
    }

    /// Appends a span; false if the vector is full.
    pub fn push_span(&mut self, span: HostSpan) -> bool {
        self.entries.push(HostSpan::as_iovecs(&[span])[0])
    }
}

impl<'a> SendVector<'a> {
    /// Appends a buffer; false if the vector is full.
    pub fn push_bytes(&mut self, bytes: &'a [u8]) -> bool {
        self.entries
            .push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
    }
}

impl<'a> RecvVector<'a> {
    /// Appends a buffer; false if the vector is full.
    pub fn push_buffer(&mut self, buffer: &'a mut [u8]) -> bool {
        self.entries
            .push(libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() })
    }
}

impl Socket {
    /// Sends a vector in one call; returns how many bytes the kernel took.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn send_vector(&self, vector: &SendVector<'_>) -> io::Result<usize> {
        // Each entry is a slice borrowed for the vector's life, or a mapped span.
        self.sendmsg(vector.entries.as_slice())
    }

    /// Receives into a vector in one call; 0 at the end of the stream, or for an empty vector.
    ///
    /// # Errors
    /// `WouldBlock`, or another error of the kernel.
    pub fn recv_vector(&self, vector: &mut RecvVector<'_>) -> io::Result<usize> {
        // Each entry is a slice borrowed mutably for the vector's life, or a mapped, writable span.
        self.recvmsg(vector.entries.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Mapping;
    use crate::poll::{Interest, wait_one};
    use std::net::SocketAddr;
    use std::os::fd::AsFd;

    fn pair() -> (Socket, Socket) {
        let any: SocketAddr = "127.0.0.1:0".parse().expect("a literal address");
        let listener = Socket::listen(any).expect("a port");
        let one = Socket::connect(listener.local_addr().expect("bound")).expect("listening");
        wait_one(listener.as_fd(), Interest::Read, None).expect("a connection comes");
        let (other, _) = listener.accept().expect("a connection waits");
        (one, other)
    }

    #[test]
    fn heads_and_payloads_cross_in_one_call_each_way() {
        let (one, other) = pair();
        let map = Mapping::anonymous(4096).expect("memory");
        map.span(0, 3).copy_from(b"abc");
        let mut out = SendVector::new();
        assert!(out.push_bytes(b"<1>") && out.push_span(map.span(0, 2)));
        assert!(out.push_bytes(b"<2>") && out.push_span(map.span(2, 1)));
        assert_eq!(
            (out.bytes(), one.send_vector(&out).expect("the socket buffer is empty")),
            (9, 9)
        );

        wait_one(other.as_fd(), Interest::Read, None).expect("bytes come");
        let (mut first, mut second) = ([0; 3], [0; 3]);
        let mut vector = RecvVector::new();
        assert!(vector.push_buffer(&mut first) && vector.push_span(map.span(100, 2)));
        assert!(vector.push_buffer(&mut second) && vector.push_span(map.span(200, 9)));
        assert_eq!(other.recv_vector(&mut vector).expect("bytes"), 9);
        let (mut ab, mut c) = ([0; 2], [0; 1]);
        map.span(100, 2).copy_to(&mut ab);
        map.span(200, 1).copy_to(&mut c);
        assert_eq!((&first, &ab, &second, &c), (b"<1>", b"ab", b"<2>", b"c"));
    }

    #[test]
    fn a_full_vector_refuses_further_entries() {
        let mut vector = SendVector::new();
        for _ in 0..SPANS_MAX {
            assert!(vector.push_bytes(b"x"));
        }
        assert!(!vector.push_bytes(b"y"));
        assert_eq!(vector.bytes(), SPANS_MAX);
    }
}
