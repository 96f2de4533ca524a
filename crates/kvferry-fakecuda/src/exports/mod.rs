//! The exported C functions.
//!
//! Each takes its arguments in the types of this module, which hold the promises that a C caller
//! makes, enters the driver once, and lets no panic out.

#![allow(non_snake_case, reason = "the names are the driver's")]

mod contexts;
mod control;
mod copies;
mod devices;
mod events;
mod ipc;
mod memory;
mod modules;
mod pointers;
mod streams;
mod symbols;
mod vmm;

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{Error, Result};
use crate::counters::forked;
use crate::state::Session;
use crate::thread;

/// A pointer through which an exported function answers. Such a value exists only as an argument
/// of an exported function, whose caller promises that it is null or may be written.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the answer. `INVALID_VALUE` for null.
    fn set(&self, value: T) -> Result {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller promises that a pointer which is not null may be written. Nothing
        // says that it is aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the answer unless the caller wants none.
    fn set_if_wanted(&self, value: T) {
        // Null is the caller's way to want none.
        let _ = self.set(value);
    }

    fn require(&self) -> Result {
        if self.0.is_null() { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    /// Writes at most `len` elements.
    fn set_slice(&self, values: &[T], len: usize) -> Result
    where
        T: Copy,
    {
        self.require()?;
        // SAFETY: the caller promises that `len` elements may be written.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, values.len().min(len)) };
        Ok(())
    }
}

/// A pointer that an exported function reads. Such a value exists only as an argument of an
/// exported function, whose caller promises that it is null or may be read.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    fn get(&self) -> Result<T> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller promises that a pointer which is not null may be read.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Copies `len` elements. `INVALID_VALUE` for null, unless `len` is 0.
    fn slice(&self, len: usize) -> Result<Vec<T>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller promises that `len` elements may be read.
        Ok((0..len).map(|index| unsafe { self.0.add(index).read_unaligned() }).collect())
    }
}

/// A C string under the same promise as [`In`].
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    fn read(&self) -> Result<String> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller promises that a pointer which is not null is a C string.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Error::INVALID_VALUE)
    }
}

/// Runs a call that works before `cuInit`.
fn enter_early(name: &'static str, call: impl FnOnce(&mut Session) -> Result) -> c_int {
    let run = || {
        if forked() {
            return Err(Error::NOT_INITIALIZED);
        }
        let mut session = Session::lock();
        *session.counters.calls.entry(name).or_insert(0) += 1;
        thread::with(|local| *local.calls.entry(name).or_insert(0) += 1);
        call(&mut session)
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.0,
        Err(_) => Error::UNKNOWN.0,
    }
}

/// Runs a call of the driver. Host functions must make none.
fn enter(name: &'static str, call: impl FnOnce(&mut Session) -> Result) -> c_int {
    enter_early(name, |session| {
        if !session.initialized {
            return Err(Error::NOT_INITIALIZED);
        }
        if thread::with(|local| local.callback.is_some()) {
            session.counters.callback_calls += 1;
            return Err(Error::NOT_PERMITTED);
        }
        call(session)
    })
}

/// Runs a call that needs a current context, with its device.
fn enter_current(name: &'static str, call: impl FnOnce(&mut Session, usize) -> Result) -> c_int {
    enter(name, |session| {
        let device = session.current()?;
        call(session, device)
    })
}
