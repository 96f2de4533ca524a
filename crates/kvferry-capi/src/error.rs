//! The error that functions fill in, and the texts of errors.

use crate::failure::{
    Failure, KVFERRY_BAD_HANDLE, KVFERRY_DUPLICATE, KVFERRY_INTERNAL, KVFERRY_MISMATCH, KVFERRY_OK,
    KVFERRY_PENDING, kind,
};
use crate::structs::{self, Versioned};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

/// Why a call failed. Set `size` to `sizeof(kvferry_error)` before the call. Every function that takes
/// one fills it in, also on success; NULL is allowed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvferry_error {
    pub size: usize,
    /// The code that the function returned.
    pub code: i32,
    /// For a transfer that ended early: 1 if it is certain that none of its bytes arrive any more, 0 if
    /// that is not certain, -1 if nothing was in progress.
    pub quiesced: i32,
    /// One line of UTF-8; empty on success. Cut if it does not fit.
    pub text: [c_char; 496],
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers only.
unsafe impl Versioned for kvferry_error {}

impl std::fmt::Debug for kvferry_error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("kvferry_error").field("code", &self.code).finish_non_exhaustive()
    }
}

/// A failure as the structure that callers get.
pub(crate) fn of(failure: &Failure) -> kvferry_error {
    kvferry_error {
        size: size_of::<kvferry_error>(),
        code: failure.code,
        quiesced: failure.quiesced.map_or(-1, i32::from),
        text: structs::fixed(&failure.text),
    }
}

/// Fills in the caller's error, if the caller wants one, and remembers the text for the thread.
pub(crate) fn write(theirs: *mut kvferry_error, failure: Option<&Failure>) {
    if let Some(failure) = failure {
        remember(&failure.text);
    }
    if theirs.is_null() {
        return;
    }
    let fine = Failure { code: KVFERRY_OK, text: String::new(), quiesced: None };
    let ours = of(failure.unwrap_or(&fine));
    // SAFETY: the header asks for a structure of as many bytes as its size says. A wrong size leaves it
    // as it is.
    let _ = unsafe { structs::write(theirs, &ours, "the error") };
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Remembers the text of this thread's last failure.
pub(crate) fn remember(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends may have no memory of its own any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// The reason of the last call of this thread that failed, of this header's functions and of Mooncake's.
/// Valid until the thread's next call. Never NULL.
///
/// Any thread; also after a fork.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of a code, such as "peer_reset"; "unknown" for a number that is none. Lives for ever.
///
/// Any thread; also after a fork.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_error_name(code: c_int) -> *const c_char {
    let names: &'static [CString] = {
        static NAMES: std::sync::OnceLock<Vec<CString>> = std::sync::OnceLock::new();
        NAMES.get_or_init(|| {
            let name = |code| match (code, kind(code)) {
                (KVFERRY_OK, _) => "ok",
                (KVFERRY_PENDING, _) => "pending",
                (KVFERRY_BAD_HANDLE, _) => "bad_handle",
                (KVFERRY_MISMATCH, _) => "mismatch",
                (KVFERRY_DUPLICATE, _) => "duplicate",
                (_, Some(kind)) => kind.as_str(),
                (_, None) => "unknown",
            };
            (0..=KVFERRY_INTERNAL)
                .map(|code| CString::new(name(code)).unwrap_or_default())
                .collect()
        })
    };
    let unknown: &CStr = c"unknown";
    usize::try_from(code).ok().and_then(|at| names.get(at)).map_or(unknown.as_ptr(), |n| n.as_ptr())
}

/// The library's version, such as "0.1.0". Lives for ever.
///
/// Any thread; also after a fork.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{KVFERRY_IO, code};
    use kvferry::ErrorKind;

    #[test]
    fn every_kind_of_error_has_a_code_of_its_own_and_its_name() {
        let mut codes = Vec::new();
        for kind in ErrorKind::ALL {
            let code = code(*kind);
            assert_eq!(crate::failure::kind(code), Some(*kind));
            // SAFETY: the name lives for ever and ends with a NUL.
            let name = unsafe { CStr::from_ptr(kvferry_error_name(code)) };
            assert_eq!(name.to_str(), Ok(kind.as_str()));
            codes.push(code);
        }
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), ErrorKind::ALL.len());
    }

    #[test]
    fn a_text_that_does_not_fit_is_cut_between_two_characters() {
        let failure = Failure::new(KVFERRY_IO, "ü".repeat(400));
        let error = of(&failure);
        // SAFETY: `fixed` ends every text with a NUL.
        let text = unsafe { CStr::from_ptr(error.text.as_ptr()) };
        assert_eq!(text.to_str(), Ok("ü".repeat(247).as_str()));
    }
}
