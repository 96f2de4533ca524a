//! Memory that starts at a page, as the memory of a KV pool does. What a vector gives starts
//! sixteen bytes into one, and from there the kernel needs a quarter more time for 4 KiB blocks.

use std::ops::{Deref, DerefMut};

const PAGE: usize = 4096;

/// Bytes that start at a page.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    bytes: Vec<u8>,
    start: usize,
}

impl Pages {
    /// All of the same value, so that every page is there.
    pub(crate) fn filled(value: u8, len: usize) -> Pages {
        let bytes = vec![value; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        assert!(start <= PAGE, "a byte can be aligned to a page");
        let mut pages = Pages { bytes, start };
        pages.bytes.truncate(start + len);
        // Zeroed memory is not there yet.
        pages.chunks_mut(PAGE).for_each(|page| page[0] = std::hint::black_box(value));
        pages
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_starts_a_page() {
        for len in [0, 1, 4096, 1 << 20] {
            let pages = Pages::filled(7, len);
            assert_eq!(pages.len(), len);
            assert!(len == 0 || (pages.as_ptr() as usize).is_multiple_of(PAGE));
            assert!(pages.iter().all(|&byte| byte == 7));
        }
        assert!(Pages::default().is_empty());
    }
}
