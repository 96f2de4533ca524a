//! Random bytes from the kernel.

use std::io;

/// Fills `buffer` from the kernel's generator.
///
/// # Errors
/// If the kernel's generator fails.
pub fn fill(buffer: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while at < buffer.len() {
        match rustix::rand::getrandom(&mut buffer[at..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => at += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// `N` random bytes.
///
/// # Errors
/// If the kernel's generator fails.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut out = [0; N];
    fill(&mut out)?;
    Ok(out)
}
