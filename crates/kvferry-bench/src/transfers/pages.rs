//! Memory that starts at a page, as a KV pool does. A large vector starts sixteen bytes into one, and
//! then the kernel needs a quarter more time for blocks of 4 KiB.

use std::ops::{Deref, DerefMut};

const PAGE: usize = 4096;

/// Bytes that start at a page.
#[derive(Debug, Default)]
pub(super) struct Pages {
    bytes: Vec<u8>,
    start: usize,
}

impl Pages {
    /// Filled with `value`; every page is touched.
    pub(super) fn filled(value: u8, len: usize) -> Pages {
        let bytes = vec![value; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        assert!(start <= PAGE, "a byte can be aligned to a page");
        let mut pages = Pages { bytes, start };
        pages.bytes.truncate(start + len);
        // Zeroed memory has no pages yet.
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
