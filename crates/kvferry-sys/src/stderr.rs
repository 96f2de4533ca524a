//! Standard error, for lines of a library whose process is not its own.
//!
//! A pipe that nothing reads is full after 64 KiB, and a plain write to it never returns: the thread that logs, and all
//! that wait for its locks, would stop. So a line is left out where its reader does not take it in time.

use crate::poll::{Interest, wait_one};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};
use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How long a buffer waits for a reader, unless the one before has waited in vain.
const PATIENCE: Duration = Duration::from_millis(100);

/// Bytes that a pipe takes at once if it has room: `PIPE_BUF`.
const PIECE: usize = 4096;

/// Lines that were left out since the last one that was not.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Writes each buffer, one or more whole lines, to standard error or leaves it out. It never fails. A buffer waits for
/// 100 ms at most, except at a terminal that was stopped. The next one that is written has before it how many were left
/// out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        write_to(io::stderr().as_fd(), lines, &LEFT_OUT);
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether the lines were written.
fn write_to(fd: BorrowedFd<'_>, lines: &[u8], left_out: &AtomicU64) -> bool {
    let before = left_out.swap(0, Relaxed);
    let patience = if before == 0 { PATIENCE } else { Duration::ZERO };
    let give_up = Instant::now() + patience;
    // The last line may have been cut.
    let note = format!("\nkvferry: {before} messages were left out: standard error was not read\n");
    if before > 0 && !write_all(fd, note.as_bytes(), give_up) {
        left_out.fetch_add(before + 1, Relaxed);
        return false;
    }
    let written = write_all(fd, lines, give_up);
    if !written {
        left_out.fetch_add(1, Relaxed);
    }
    written
}

/// Whether all of `bytes` was written.
fn write_all(fd: BorrowedFd<'_>, bytes: &[u8], give_up: Instant) -> bool {
    bytes.chunks(PIECE).all(|piece| write_piece(fd, piece, give_up))
}

fn write_piece(fd: BorrowedFd<'_>, mut piece: &[u8], give_up: Instant) -> bool {
    while !piece.is_empty() {
        let left = give_up.saturating_duration_since(Instant::now());
        let written = match write_now(fd, piece) {
            Err(Errno::AGAIN) if is_writable(fd, left) => write_now(fd, piece),
            written => written,
        };
        match written {
            Ok(count @ 1..) => piece = &piece[count..],
            Err(Errno::INTR) => {}
            Ok(0) | Err(_) => return false,
        }
    }
    true
}

fn is_writable(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    wait_one(fd, Interest::WriteOnly, Some(patience)).is_ok_and(|ready| ready.write)
}

/// Writes what can be written at once. Where there is no such write, to a pipe before Linux 6.4 and to a terminal, it
/// waits if another thread or process takes the room that it has found, and for the rest of a line at a terminal that
/// was stopped. A file waits for no reader.
fn write_now(fd: BorrowedFd<'_>, piece: &[u8]) -> rustix::io::Result<usize> {
    if rustix::fs::fstat(fd).is_ok_and(|it| FileType::from_raw_mode(it.st_mode).is_file()) {
        return rustix::io::write(fd, piece);
    }
    match rustix::io::pwritev2(fd, &[IoSlice::new(piece)], u64::MAX, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE | Errno::PERM) => {}
        written => return written,
    }
    match is_writable(fd, Duration::ZERO) {
        true => rustix::io::write(fd, piece),
        false => Err(Errno::AGAIN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, pipe};

    #[test]
    fn a_pipe_that_nothing_reads_holds_no_line_up_and_what_was_left_out_is_counted() {
        let (mut read, write) = pipe().expect("a pipe");
        let left_out = AtomicU64::new(0);
        let line = [&[b'x'; 2 * PIECE][..], b"\n"].concat();
        let (mut lines, mut lost) = (0, 0);
        while lost < 1000 {
            lost += u64::from(!write_to(write.as_fd(), &line, &left_out));
            lines += 1;
            assert!(lines < 10_000, "a pipe has an end");
        }
        let text = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut text = String::new();
                read.read_to_string(&mut text).expect("text");
                text
            });
            while !write_to(write.as_fd(), b"at last\n", &left_out) {
                lost += 1;
            }
            drop(write);
            reader.join().expect("no panic")
        });
        let notes = text.lines().filter_map(|line| line.strip_prefix("kvferry: "));
        let noted = notes.filter_map(|note| note.split(' ').next()?.parse::<u64>().ok());
        assert_eq!(noted.sum::<u64>(), lost, "each that was left out is in one note");
        assert!(text.ends_with("at last\n"));
    }

    #[test]
    fn lines_for_a_reader_that_is_gone_and_for_a_file_are_no_error() {
        let (read, write) = pipe().expect("a pipe");
        drop(read);
        let left_out = AtomicU64::new(0);
        assert!(!write_to(write.as_fd(), b"line\n", &left_out));
        assert_eq!(left_out.swap(0, Relaxed), 1);
        let name = format!("kvferry-stderr-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = File::create(&path).expect("a file");
        assert!(write_to(file.as_fd(), b"line\n", &left_out));
        assert!(write_to(file.as_fd(), b"another\n", &left_out));
        let text = std::fs::read_to_string(&path).expect("it was written");
        std::fs::remove_file(path).expect("it is there");
        assert_eq!((text.as_str(), left_out.load(Relaxed)), ("line\nanother\n", 0));
    }
}
