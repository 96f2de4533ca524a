//! Structures that begin with their size.
//!
//! A program says in the field `size` how much of a structure it knows. A field that it does not know
//! has its default, zero. A field that this library does not know must be zero: otherwise the program
//! asks for something that the library can't do.

use crate::failure::{self, Failure};
use kvferry::ErrorKind;
use std::ffi::c_char;

/// Bytes of a structure at most: a larger size is a mistake.
const SIZE_MAX: usize = 4096;

/// A structure of C of which any bytes are a value, and all zeroes the default.
///
/// # Safety
/// `repr(C)`, the first field is `size: usize`, and any bytes are a value.
pub(crate) unsafe trait Versioned: Copy {}

fn size_of_theirs(size: usize, what: &str) -> Result<usize, Failure> {
    // No structure ends within eight bytes of another field: a size that does would cut a pointer in two.
    let is_possible = size.is_multiple_of(size_of::<usize>());
    if is_possible && (size_of::<usize>()..=SIZE_MAX).contains(&size) {
        return Ok(size);
    }
    Err(Failure::invalid(format!("{what}: set its field size to sizeof, not {size}")))
}

/// Reads a structure of the caller; null is all defaults.
///
/// # Safety
/// `theirs` is null, or has as many bytes as its field `size` says.
pub(crate) unsafe fn read<T: Versioned>(theirs: *const T, what: &str) -> Result<T, Failure> {
    // SAFETY: all zeroes are a value of a `Versioned`.
    let mut ours: T = unsafe { std::mem::zeroed() };
    if theirs.is_null() {
        return Ok(ours);
    }
    // SAFETY: the first field of a `Versioned` is its size; the caller's promise.
    let size = unsafe { theirs.cast::<usize>().read_unaligned() };
    let size = size_of_theirs(size, what)?;
    let known = size.min(size_of::<T>());
    // SAFETY: the caller promises `size` bytes; any bytes are a value of a `Versioned`.
    let unknown = unsafe {
        std::ptr::from_mut(&mut ours).cast::<u8>().copy_from_nonoverlapping(theirs.cast(), known);
        std::slice::from_raw_parts(theirs.cast::<u8>().add(known), size - known)
    };
    if unknown.iter().any(|byte| *byte != 0) {
        let text = format!("{what} has settings that this library does not know; use a later one");
        return Err(Failure::new(failure::code(ErrorKind::Unsupported), text));
    }
    Ok(ours)
}

/// Fills a structure of the caller, as much of it as the caller knows; null wants nothing.
///
/// # Safety
/// `theirs` is null, or has as many bytes as its field `size` says.
pub(crate) unsafe fn write<T: Versioned>(
    theirs: *mut T,
    ours: &T,
    what: &str,
) -> Result<(), Failure> {
    if theirs.is_null() {
        return Ok(());
    }
    // SAFETY: the first field of a `Versioned` is its size; the caller's promise.
    let size = unsafe { theirs.cast::<usize>().read_unaligned() };
    let size = size_of_theirs(size, what)?;
    let known = size.min(size_of::<T>());
    // SAFETY: the caller promises `size` bytes. The size itself stays what the caller wrote.
    unsafe {
        let first = size_of::<usize>();
        let from = std::ptr::from_ref(ours).cast::<u8>().add(first);
        theirs.cast::<u8>().add(first).copy_from_nonoverlapping(from, known - first);
        theirs.cast::<u8>().add(known).write_bytes(0, size - known);
    }
    Ok(())
}

/// Text in a fixed field: as much as fits, with a NUL.
pub(crate) fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (to, from) in field.iter_mut().zip(&text.as_bytes()[..end]) {
        *to = from.cast_signed() as c_char;
    }
    field
}
