//! Codes and the error that functions fill in.

use crate::guard::Failure;
use crate::handles;
use crate::structs::{self, Versioned};
use kvferry::ErrorKind;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

/// Success.
pub const KVFERRY_OK: c_int = 0;
/// Not an error: the transfer has not ended, or no notification came in time.
pub const KVFERRY_PENDING: c_int = 1;
/// A handle is NULL, was freed, or is of another kind.
pub const KVFERRY_BAD_HANDLE: c_int = 2;
/// The receiver of a task wants a block that the sender lacks, or of another length.
pub const KVFERRY_MISMATCH: c_int = 3;
/// Another task has the key.
pub const KVFERRY_DUPLICATE: c_int = 4;

macro_rules! codes {
    ($($(#[$doc:meta])* $kind:ident = $name:ident,)*) => {
        /// The code of an error of the core.
        pub(crate) fn code(kind: ErrorKind) -> c_int {
            match kind {
                $(ErrorKind::$kind => $name,)*
                // A kind that is newer than this table.
                _ => KVFERRY_INTERNAL,
            }
        }

        fn kind(code: c_int) -> Option<ErrorKind> {
            match code {
                $($name => Some(ErrorKind::$kind),)*
                _ => None,
            }
        }
    };
}

codes! {
    InvalidArgument = KVFERRY_INVALID_ARGUMENT,
    Overlap = KVFERRY_OVERLAP,
    NotRegistered = KVFERRY_NOT_REGISTERED,
    OutOfBounds = KVFERRY_OUT_OF_BOUNDS,
    AccessDenied = KVFERRY_ACCESS_DENIED,
    Revoked = KVFERRY_REVOKED,
    Quarantined = KVFERRY_QUARANTINED,
    Unreachable = KVFERRY_UNREACHABLE,
    PeerReset = KVFERRY_PEER_RESET,
    PeerSilent = KVFERRY_PEER_SILENT,
    PeerClosed = KVFERRY_PEER_CLOSED,
    AuthRequired = KVFERRY_AUTH_REQUIRED,
    AuthUnsupported = KVFERRY_AUTH_UNSUPPORTED,
    AuthFailed = KVFERRY_AUTH_FAILED,
    VersionMismatch = KVFERRY_VERSION_MISMATCH,
    StaleIncarnation = KVFERRY_STALE_INCARNATION,
    Deadline = KVFERRY_DEADLINE,
    Cancelled = KVFERRY_CANCELLED,
    Interrupted = KVFERRY_INTERRUPTED,
    Checksum = KVFERRY_CHECKSUM,
    TooLarge = KVFERRY_TOO_LARGE,
    Busy = KVFERRY_BUSY,
    Shutdown = KVFERRY_SHUTDOWN,
    Forked = KVFERRY_FORKED,
    Unsupported = KVFERRY_UNSUPPORTED,
    Protocol = KVFERRY_PROTOCOL,
    Io = KVFERRY_IO,
    Internal = KVFERRY_INTERNAL,
}

/// An argument is invalid: a zero length, a size that is not sizeof, text that is not UTF-8.
pub const KVFERRY_INVALID_ARGUMENT: c_int = 10;
/// The range overlaps a registered one.
pub const KVFERRY_OVERLAP: c_int = 11;
/// The range or region is not registered, or not any more.
pub const KVFERRY_NOT_REGISTERED: c_int = 12;
/// A range reaches beyond its region.
pub const KVFERRY_OUT_OF_BOUNDS: c_int = 13;
/// The region does not permit the access.
pub const KVFERRY_ACCESS_DENIED: c_int = 14;
/// The region was unregistered while it was in use.
pub const KVFERRY_REVOKED: c_int = 15;
/// A process that does not answer may still write to memory that was unregistered: do not reuse it.
pub const KVFERRY_QUARANTINED: c_int = 16;
/// No connection to the peer could be made.
pub const KVFERRY_UNREACHABLE: c_int = 17;
/// The connection to the peer broke.
pub const KVFERRY_PEER_RESET: c_int = 18;
/// The peer is connected but silent.
pub const KVFERRY_PEER_SILENT: c_int = 19;
/// The peer ended the session.
pub const KVFERRY_PEER_CLOSED: c_int = 20;
/// The peer requires a secret and this agent has none.
pub const KVFERRY_AUTH_REQUIRED: c_int = 21;
/// This agent has a secret and the peer has none.
pub const KVFERRY_AUTH_UNSUPPORTED: c_int = 22;
/// The secrets of the two agents differ.
pub const KVFERRY_AUTH_FAILED: c_int = 23;
/// The two agents share no protocol version.
pub const KVFERRY_VERSION_MISMATCH: c_int = 24;
/// A description belongs to an earlier incarnation of the peer.
pub const KVFERRY_STALE_INCARNATION: c_int = 25;
/// The call did not end within its time.
pub const KVFERRY_DEADLINE: c_int = 26;
/// The caller cancelled the transfer.
pub const KVFERRY_CANCELLED: c_int = 27;
/// The call was interrupted. No function of this header returns it.
pub const KVFERRY_INTERRUPTED: c_int = 28;
/// The received bytes differ from the sent bytes.
pub const KVFERRY_CHECKSUM: c_int = 29;
/// A limit was exceeded, or a buffer of the caller is too small.
pub const KVFERRY_TOO_LARGE: c_int = 30;
/// A bounded queue is full.
pub const KVFERRY_BUSY: c_int = 31;
/// The agent is shut down.
pub const KVFERRY_SHUTDOWN: c_int = 32;
/// The handle belongs to the process that forked this one.
pub const KVFERRY_FORKED: c_int = 33;
/// No permitted transport, or this version of the library, supports the operation.
pub const KVFERRY_UNSUPPORTED: c_int = 34;
/// The peer violated the protocol.
pub const KVFERRY_PROTOCOL: c_int = 35;
/// The operating system reported an error.
pub const KVFERRY_IO: c_int = 36;
/// A defect in kvferry.
pub const KVFERRY_INTERNAL: c_int = 37;

/// Why a call failed. Set `size` to `sizeof(kvferry_error)` before the call. Every function that takes
/// one fills it in, also on success; NULL is allowed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvferry_error {
    pub size: usize,
    /// What the function returned.
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

/// How many handles of this process were not freed. For tests that look for leaks.
///
/// Any thread; also after a fork.
#[unsafe(no_mangle)]
pub extern "C" fn kvferry_handles_in_use() -> usize {
    handles::count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_a_code_of_its_own_and_its_name() {
        let mut codes = Vec::new();
        for kind in ErrorKind::ALL {
            let code = code(*kind);
            assert_eq!(super::kind(code), Some(*kind));
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
