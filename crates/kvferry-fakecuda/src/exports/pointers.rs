//! What the driver says about a pointer.

use std::ffi::{c_int, c_uint, c_void};

use super::{In, Out, enter};
use crate::abi::{DevicePtr, Error, MEMORY_DEVICE, MEMORY_HOST, Result};
use crate::memory::{HostRange, Kind, Mapping};
use crate::state::State;

/// An attribute's value in the width that the driver writes.
enum Value {
    Wide(u64),
    Word(u32),
    Flag(bool),
    /// The attribute does not apply to the pointer.
    Refused(Error),
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    pointer: DevicePtr,
) -> c_int {
    enter("cuPointerGetAttribute", |session| {
        // The single form refuses pointers that the driver does not know.
        let known =
            session.memory.mapping(pointer).is_some() || session.memory.host(pointer).is_some();
        if !known {
            return Err(Error::INVALID_VALUE);
        }
        let value = attribute_of(session, attribute, pointer)?;
        write(data, value)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: In<c_int>,
    data: In<*mut c_void>,
    pointer: DevicePtr,
) -> c_int {
    enter("cuPointerGetAttributes", |session| {
        let attributes = attributes.slice(count as usize)?;
        let data = data.slice(count as usize)?;
        for (attribute, data) in attributes.into_iter().zip(data) {
            let value = attribute_of(session, attribute, pointer)?;
            match value {
                // What does not apply to the pointer is null.
                Value::Refused(_) => write(data, Value::Wide(0))?,
                value => write(data, value)?,
            }
        }
        Ok(())
    })
}

fn write(data: *mut c_void, value: Value) -> Result {
    match value {
        Value::Wide(value) => Out(data.cast()).set(value),
        Value::Word(value) => Out(data.cast()).set(value),
        Value::Flag(value) => Out(data.cast()).set(u8::from(value)),
        Value::Refused(error) => Err(error),
    }
}

fn attribute_of(state: &State, attribute: c_int, pointer: DevicePtr) -> Result<Value> {
    if let Some(mapping) = state.memory.mapping(pointer) {
        return of_mapping(state, mapping, attribute, pointer);
    }
    match state.memory.host(pointer) {
        Some(range) => of_host(state, range, attribute, pointer),
        None => of_unknown(attribute),
    }
}

fn of_mapping(
    state: &State,
    mapping: &Mapping,
    attribute: c_int,
    pointer: DevicePtr,
) -> Result<Value> {
    let managed = mapping.kind == Kind::Managed;
    let vmm = match mapping.kind {
        Kind::Vmm(handle) => state.vmm.get(&handle),
        _ => None,
    };
    let primary = state.devices[mapping.device].primary.as_ref();
    Ok(match attribute {
        // VMM memory belongs to no context.
        1 if matches!(mapping.kind, Kind::Vmm(_)) => Value::Wide(0),
        1 => Value::Wide(primary.map_or(0, |primary| primary.handle as u64)),
        2 => Value::Word(MEMORY_DEVICE),
        3 => Value::Wide(pointer),
        4 if managed => Value::Wide(pointer),
        4 | 5 => Value::Refused(Error::INVALID_VALUE),
        6 => Value::Flag(false),
        7 => Value::Wide(mapping.buffer_id),
        8 => Value::Flag(managed),
        9 => Value::Word(mapping.device as u32),
        10 => Value::Flag(mapping.kind == Kind::Allocation),
        11 => Value::Wide(mapping.base),
        12 => Value::Wide(mapping.len),
        13 => Value::Flag(true),
        14 => Value::Wide(vmm.map_or(0, |handle| handle.handle_types as u64)),
        15 => Value::Flag(!managed && vmm.is_none_or(|handle| handle.rdma_capable != 0)),
        16 => Value::Word(if mapping.writable != 0 { 3 } else { 0 }),
        17 => Value::Wide(0),
        18 => Value::Wide(mapping.len),
        19 => Value::Wide(mapping.base),
        20 => Value::Wide(mapping.buffer_id),
        21 => Value::Flag(false),
        _ => return Err(Error::INVALID_VALUE),
    })
}

fn of_host(
    state: &State,
    range: &HostRange,
    attribute: c_int,
    pointer: DevicePtr,
) -> Result<Value> {
    let primary = state.devices[range.device].primary.as_ref();
    Ok(match attribute {
        1 => Value::Wide(primary.map_or(0, |primary| primary.handle as u64)),
        2 => Value::Word(MEMORY_HOST),
        3 | 4 => Value::Wide(pointer),
        5 => Value::Refused(Error::INVALID_VALUE),
        7 => Value::Wide(range.base),
        6 | 8 | 10 | 15 | 21 => Value::Flag(false),
        9 => Value::Word(range.device as u32),
        11 | 19 => Value::Wide(range.base),
        12 | 18 => Value::Wide(range.len),
        13 => Value::Flag(true),
        14 | 17 | 20 => Value::Wide(0),
        16 => Value::Word(3),
        _ => return Err(Error::INVALID_VALUE),
    })
}

/// Host memory that the driver does not know: zero or null for each attribute.
fn of_unknown(attribute: c_int) -> Result<Value> {
    Ok(match attribute {
        2 | 16 => Value::Word(0),
        9 => Value::Word(-2i32 as u32),
        6 | 8 | 10 | 13 | 15 | 21 => Value::Flag(false),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => Value::Wide(0),
        5 => Value::Refused(Error::INVALID_VALUE),
        _ => return Err(Error::INVALID_VALUE),
    })
}
