//! The one way out of every function: a code, and an error text if the caller wants one.

use crate::error::{self, kvferry_error};
use crate::failure::{self, Failure};
use kvferry::ErrorKind;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What functions do inside. `Ok` is the code to return: `KVFERRY_OK` or `KVFERRY_PENDING`.
pub(crate) type Outcome = Result<c_int, Failure>;

/// Runs a function's body and reports how it ended.
pub(crate) fn run(error: *mut kvferry_error, body: impl FnOnce() -> Outcome) -> c_int {
    let failure = match contain(body) {
        Ok(Ok(code)) => {
            error::write(error, None);
            return code;
        }
        Ok(Err(failure)) => failure,
        Err(text) => Failure::new(failure::code(ErrorKind::Internal), text),
    };
    error::write(error, Some(&failure));
    failure.code
}

/// Runs a body; a panic is its text.
pub(crate) fn contain<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    // What a panic leaves inconsistent is behind locks that go on after it, or is dropped.
    catch_unwind(AssertUnwindSafe(body)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        let text = format!("a defect in kvferry: {text}");
        // Dropping the panic's payload may panic, too.
        std::mem::forget(panic);
        text
    })
}

/// Text of the caller.
///
/// # Safety
/// `text` is null or ends with a NUL, and lives for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller's promise.
    let found = unsafe { optional_text(text, what) }?;
    found.ok_or_else(|| Failure::invalid(format!("{what} is NULL")))
}

/// Reads a text like [`text`]; null is none.
///
/// # Safety
/// The same as for [`text`].
pub(crate) unsafe fn optional_text<'a>(
    text: *const c_char,
    what: &str,
) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the caller promises the NUL.
    let text = unsafe { CStr::from_ptr(text) };
    let not_utf8 = |_| Failure::invalid(format!("{what} is not UTF-8"));
    text.to_str().map(Some).map_err(not_utf8)
}

/// An array of the caller; null is allowed if it is empty.
///
/// # Safety
/// `items` has `count` elements, and lives for `'a`.
pub(crate) unsafe fn array<'a, T>(
    items: *const T,
    count: usize,
    what: &str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if items.is_null() || !items.is_aligned() || count > isize::MAX as usize / size_of::<T>().max(1)
    {
        return Err(Failure::invalid(format!("{what} is not an array of {count}")));
    }
    // SAFETY: not null, aligned, of an allowed size; the caller promises the elements.
    Ok(unsafe { std::slice::from_raw_parts(items, count) })
}

/// Stores a result where the caller wants it.
///
/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn store<T>(place: *mut T, value: T, what: &str) -> Result<(), Failure> {
    if place.is_null() {
        return Err(Failure::invalid(format!("{what} is NULL")));
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { place.write(value) };
    Ok(())
}

/// Copies text with its NUL to the caller's buffer.
///
/// # Safety
/// `buffer` has `capacity` bytes.
pub(crate) unsafe fn store_text(
    text: &str,
    buffer: *mut c_char,
    capacity: usize,
    what: &str,
) -> Result<(), Failure> {
    if buffer.is_null() || text.len() >= capacity {
        let code = failure::code(ErrorKind::TooLarge);
        let needed = text.len() + 1;
        return Err(Failure::new(code, format!("{what} needs a buffer of {needed} bytes")));
    }
    // SAFETY: the buffer has room for the text and the NUL.
    unsafe {
        buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        buffer.add(text.len()).write(0);
    }
    Ok(())
}
