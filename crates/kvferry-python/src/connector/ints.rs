//! Reads sequences of ints, such as the tokens of a prompt and the numbers of blocks.
//!
//! The engine's scheduler waits while a prompt of 128 k tokens is read, and a call of the stable ABI for each token takes
//! longer than hashing them all. So the items of a list are read directly from `CPython`'s memory. The wheel is one
//! for all versions of `CPython`, so [`Layout::of_interpreter`] decides when the module is imported: the running version
//! must be one whose headers were read, and its lists and ints must pass a test. Otherwise, and for all items but plain
//! ints below 2^30, the calls of the stable ABI are used.
//!
//! The interpreter's lock is held from the first item to the last, so no other thread changes a list meanwhile. Only the
//! `__index__` of an item that is no int can change the list or give up the lock. So no pointer into the list is kept over
//! such a call: the list is looked at anew after it, as a `for` loop of Python does.

use crate::memory::room;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyInt, PyList};
use std::mem::offset_of;

/// Ints that are handed on together: they stay in the processor's first cache.
const AT_ONCE: usize = 1024;

/// An int as four little-endian bytes.
pub(super) type Int = [u8; 4];

/// The beginning of `CPython`'s `PyLongObject`.
#[repr(C)]
struct LongObject {
    head: ffi::PyObject,
    /// The number of digits and the sign.
    tag: usize,
    first_digit: u32,
}

/// The beginning of `CPython`'s `PyListObject`.
#[repr(C)]
struct ListObject {
    head: ffi::PyVarObject,
    items: *const *mut ffi::PyObject,
}

/// Tags with which the running interpreter marks ints.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Bits of [`LongObject::tag`] that say nothing of the value.
    ignored: usize,
    /// The other bits of zero.
    zero: usize,
    /// The other bits of positive ints of one digit of 30 bits.
    one_digit: usize,
}

/// The layout of ints; `None` if this interpreter's ints are read by calls only.
static LAYOUT: PyOnceLock<Option<Layout>> = PyOnceLock::new();

/// True if ints in lists are read without a call for each.
pub(crate) fn are_read_directly(py: Python<'_>) -> bool {
    Layout::of_interpreter(py).is_some()
}

/// Calls `take` with all items of a sequence, many at a time.
///
/// # Errors
/// The value is no sequence; an item is no int (`TypeError`) or no int of 32 bits (`OverflowError`).
pub(super) fn read(sequence: &Bound<'_, PyAny>, mut take: impl FnMut(&[Int])) -> PyResult<()> {
    // A subclass may have another `__iter__`.
    let Ok(list) = sequence.cast_exact::<PyList>() else {
        let items = sequence.extract::<Vec<Bound<'_, PyAny>>>()?;
        let ints = items.iter().enumerate().map(|(at, item)| int(at, item));
        let ints = ints.collect::<PyResult<Vec<_>>>()?;
        take(&ints);
        return Ok(());
    };
    let layout = Layout::of_interpreter(list.py());
    let mut ints = vec![Int::default(); AT_ONCE.min(list.len())];
    let (mut at, mut filled) = (0, 0);
    while at < list.len() {
        if filled == ints.len() {
            take(&ints);
            filled = 0;
        }
        let directly = layout.map_or(0, |layout| layout.read(list, at, &mut ints[filled..]));
        at += directly;
        filled += directly;
        if filled < ints.len() && at < list.len() {
            ints[filled] = int(at, &list.get_item(at)?)?;
            at += 1;
            filled += 1;
        }
    }
    take(&ints[..filled]);
    Ok(())
}

/// Reads an item by calls.
fn int(at: usize, item: &Bound<'_, PyAny>) -> PyResult<Int> {
    item.extract::<u32>().map(u32::to_le_bytes).map_err(|error| {
        let (py, message) = (item.py(), format!("item {at}: {}", error.value(item.py())));
        let named = if error.is_instance_of::<PyOverflowError>(py) {
            PyOverflowError::new_err(message)
        } else if error.is_instance_of::<PyTypeError>(py) {
            PyTypeError::new_err(message)
        } else {
            return error;
        };
        named.set_cause(py, Some(error));
        named
    })
}

/// The numbers of blocks of a group, or the tokens of a prompt.
#[derive(Default)]
pub(crate) struct Ids(pub(crate) Vec<u32>);

impl Ids {
    /// The numbers per group.
    pub(super) fn of(groups: Vec<Self>) -> Vec<Vec<u32>> {
        groups.into_iter().map(|ids| ids.0).collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for Ids {
    type Error = PyErr;

    fn extract(ids: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut read_ids = Vec::with_capacity(room(ids.len().unwrap_or_default()));
        read(&ids, |ints| read_ids.extend(ints.iter().map(|&int| u32::from_le_bytes(int))))?;
        Ok(Self(read_ids))
    }
}

impl Layout {
    fn of_interpreter(py: Python<'_>) -> Option<Self> {
        *LAYOUT.get_or_init(py, || Self::of_version(py).filter(|it| it.passes(py).unwrap_or(false)))
    }

    /// The layout by the headers of the running version, if they were read and its objects have the sizes they say.
    fn of_version(py: Python<'_>) -> Option<Self> {
        let version = py.version_info();
        let layout = match (version.major, version.minor) {
            (3, 10 | 11) => Self { ignored: 0, zero: 0, one_digit: 1 },
            // From 3.14 on, 4 marks the small ints that are never freed.
            (3, 12..=14) => Self { ignored: 4, zero: 1, one_digit: 8 },
            _ => return None,
        };
        has_the_sizes(py).unwrap_or(false).then_some(layout)
    }

    /// Whether it reads what calls read, of ints whose values are at the limits of the layout.
    fn passes(self, py: Python<'_>) -> PyResult<bool> {
        let small: [u64; 12] = [
            0,
            1,
            2,
            255,
            256,
            257,
            70_000,
            1 << 15,
            1 << 20,
            1 << 29,
            (1 << 30) - 2,
            (1 << 30) - 1,
        ];
        let list = PyList::empty(py);
        for number in small {
            list.append(number)?;
        }
        let mut read = [Int::default(); 12];
        if self.read(&list, 0, &mut read) != small.len() {
            return Ok(false);
        }
        let by_calls = list.iter().map(|item| item.extract::<u32>());
        let by_calls = by_calls.collect::<PyResult<Vec<_>>>()?;
        if read.map(u32::from_le_bytes)[..] != by_calls {
            return Ok(false);
        }
        let other: [i64; 9] = [-1, -5, -6, -70_000, 1 << 30, 1 << 31, 1 << 32, 1 << 60, i64::MIN];
        for number in other {
            let one = PyList::new(py, [number])?;
            if self.read(&one, 0, &mut read) != 0 {
                return Ok(false);
            }
        }
        let bool = PyList::new(py, [PyBool::new(py, true)])?;
        Ok(self.read(&bool, 0, &mut read) == 0)
    }

    /// Reads the items of a list from `from` on, until one is no plain int below 2^30 or `ints` is full, and returns how
    /// many it has read.
    fn read(self, list: &Bound<'_, PyList>, from: usize, ints: &mut [Int]) -> usize {
        let len = list.len();
        if from >= len {
            return 0;
        }
        // SAFETY: `of_version` has found that this interpreter's lists are as its headers say. So `items` points to `len`
        // pointers to objects, and `len` is not zero. The interpreter's lock is held and nothing below calls the
        // interpreter, so the list keeps its items and its memory until this function returns.
        let items =
            unsafe { std::slice::from_raw_parts((*list.as_ptr().cast::<ListObject>()).items, len) };
        let int_type = &raw mut ffi::PyLong_Type;
        let mut read = 0;
        for (&item, int) in items[from..].iter().zip(ints) {
            // SAFETY: the list owns a reference to `item`.
            if unsafe { ffi::Py_TYPE(item) } != int_type {
                break;
            }
            let item = item.cast::<LongObject>();
            // SAFETY: `item` is an int, and `of_version` has found that ints have a tag there.
            let tag = unsafe { (*item).tag } & !self.ignored;
            *int = if tag == self.one_digit {
                // SAFETY: an int with this tag has one digit, by the headers.
                unsafe { (*item).first_digit }.to_le_bytes()
            } else if tag == self.zero {
                Int::default()
            } else {
                break;
            };
            read += 1;
        }
        read
    }
}

/// Whether ints and lists have the sizes that the headers say: not so in a build with other digits, or with other fields
/// at the beginning of every object.
fn has_the_sizes(py: Python<'_>) -> PyResult<bool> {
    let size = |of: &Bound<'_, PyAny>, name: &str| of.getattr(name)?.extract::<usize>();
    let sys = py.import("sys")?;
    let digits = sys.getattr("int_info")?;
    let name = sys.getattr("implementation")?.getattr("name")?.extract::<String>()?;
    let (int, list) = (py.get_type::<PyInt>(), py.get_type::<PyList>());
    Ok(name == "cpython"
        && size(&digits, "bits_per_digit")? == 30
        && size(&digits, "sizeof_digit")? == size_of::<u32>()
        && size(&int, "__basicsize__")? == offset_of!(LongObject, first_digit)
        && size(&int, "__itemsize__")? == size_of::<u32>()
        // `PyListObject` ends with the number of items that there is memory for.
        && size(&list, "__basicsize__")? == size_of::<ListObject>() + size_of::<usize>())
}
