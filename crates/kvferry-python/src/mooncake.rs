//! The Python surface of `mooncake.engine`, over [`engine::MooncakeEngine`].
//!
//! Signatures are those of the pybind11 module it stands in for: what is positional only there is
//! so here, what has a keyword there has the same one here, numbers that are negative or have a
//! fraction are a `TypeError`, text may be bytes.

mod codes;
mod engine;
mod handles;
mod managed;
mod metadata;

use crate::aside::Interrupt;
use crate::batch::column;
use crate::blocking::{self, Stop};
use crate::error::Failure;
use engine::{Call, Direction, MooncakeEngine};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyString, PyType};
use std::ops::Deref;
use std::sync::{Arc, Mutex};

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TransferEngine>()?;
    module.add_class::<TransferOpcode>()?;
    module.add_class::<TransferNotify>()?;
    module.add_class::<InnerTransferEngine>()
}

/// Text as pybind11 takes it: str, or bytes that hold UTF-8.
struct Text(String);

impl FromPyObject<'_, '_> for Text {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = obj.cast::<PyString>() {
            return Ok(Self(text.to_str()?.to_owned()));
        }
        if let Ok(bytes) = obj.cast::<PyBytes>() {
            return Ok(Self(String::from_utf8(bytes.as_bytes().to_vec())?));
        }
        Err(PyTypeError::new_err("expected str or bytes"))
    }
}

/// An address, length or id. What does not fit 64 bits without a sign is a `TypeError`, as with
/// pybind11.
struct Number(u64);

impl FromPyObject<'_, '_> for Number {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        obj.extract().map(Self).map_err(|e| type_error(obj.py(), e))
    }
}

/// A list of them.
struct Numbers(Vec<u64>);

impl FromPyObject<'_, '_> for Numbers {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        column(&obj).map(Self).map_err(|e| type_error(obj.py(), e))
    }
}

fn type_error(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyOverflowError>(py) || error.is_instance_of::<PyValueError>(py) {
        return PyTypeError::new_err(format!(
            "incompatible function arguments: {}",
            error.value(py)
        ));
    }
    error
}

/// Which way a transfer goes.
#[pyclass(frozen, eq, hash, from_py_object, module = "kvferry.mooncake")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum TransferOpcode {
    Read = 0,
    Write = 1,
}

#[pymethods]
impl TransferOpcode {
    #[new]
    fn new(value: u64) -> PyResult<Self> {
        match value {
            0 => Ok(Self::Read),
            1 => Ok(Self::Write),
            _ => Err(PyValueError::new_err(format!("{value} is not a TransferOpcode"))),
        }
    }

    #[classattr]
    fn __members__(py: Python<'_>) -> PyResult<Py<PyDict>> {
        let members = PyDict::new(py);
        members.set_item("Read", Self::Read)?;
        members.set_item("Write", Self::Write)?;
        Ok(members.unbind())
    }

    #[getter]
    fn name(&self) -> &'static str {
        match self {
            Self::Read => "Read",
            Self::Write => "Write",
        }
    }

    #[getter]
    fn value(&self) -> u8 {
        *self as u8
    }

    fn __int__(&self) -> u8 {
        self.value()
    }

    fn __index__(&self) -> u8 {
        self.value()
    }

    fn __str__(&self) -> String {
        format!("TransferOpcode.{}", self.name())
    }

    fn __repr__(&self) -> String {
        format!("<TransferOpcode.{}: {}>", self.name(), self.value())
    }
}

impl From<TransferOpcode> for Direction {
    fn from(opcode: TransferOpcode) -> Self {
        match opcode {
            TransferOpcode::Read => Self::Read,
            TransferOpcode::Write => Self::Write,
        }
    }
}

/// A word that is delivered after the data.
#[pyclass(frozen, module = "kvferry.mooncake")]
struct TransferNotify(Mutex<Words>);

#[derive(Clone, Default)]
struct Words {
    name: String,
    msg: String,
}

impl TransferNotify {
    fn words(&self) -> Words {
        blocking::lock(&self.0).clone()
    }
}

#[pymethods]
impl TransferNotify {
    #[new]
    #[pyo3(signature = (name = None, msg = None))]
    fn new(name: Option<Text>, msg: Option<Text>) -> PyResult<Self> {
        match (name, msg) {
            (None, None) => Ok(Self(Mutex::default())),
            (Some(name), Some(msg)) => Ok(Self(Mutex::new(Words { name: name.0, msg: msg.0 }))),
            _ => Err(PyTypeError::new_err("TransferNotify takes nothing, or a name and a message")),
        }
    }

    #[getter]
    fn name(&self) -> String {
        self.words().name
    }

    #[setter]
    fn set_name(&self, name: Text) {
        blocking::lock(&self.0).name = name.0;
    }

    #[getter]
    fn msg(&self) -> String {
        self.words().msg
    }

    #[setter]
    fn set_msg(&self, msg: Text) {
        blocking::lock(&self.0).msg = msg.0;
    }
}

/// An engine in Python's hands. Its end says goodbye to peers and to the metadata server, which is
/// not to be waited for while attached to the interpreter.
struct Held(Option<Arc<MooncakeEngine>>);

impl Held {
    fn new(engine: &Arc<MooncakeEngine>) -> Self {
        Self(Some(Arc::clone(engine)))
    }
}

impl Deref for Held {
    type Target = Arc<MooncakeEngine>;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref().expect("taken only when dropped")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let engine = self.0.take();
        // Where there is no interpreter any more, the closure goes, and the engine with it.
        Python::try_attach(|py| py.detach(|| drop(engine)));
    }
}

/// What `get_engine()` returns: something to hold, with nothing to call.
#[pyclass(frozen, module = "kvferry.mooncake")]
struct InnerTransferEngine {
    _engine: Held,
}

impl Stop for MooncakeEngine {
    fn stop(&self) {
        self.shutdown();
    }
}

/// Mooncake's transfer engine, done by kvferry.
#[pyclass(frozen, weakref, module = "kvferry.mooncake")]
struct TransferEngine(Held);

impl TransferEngine {
    /// Runs a call of the engine, which answers with a code and never with an error. What a signal
    /// handler raised (Ctrl-C) is the only exception.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&MooncakeEngine, Interrupt<'_>) -> T + Send,
    ) -> PyResult<T> {
        let engine = &**self.0;
        blocking::run(py, |interrupt| Ok::<T, Failure>(call(engine, interrupt)))
    }

    fn sync(
        &self,
        py: Python<'_>,
        direction: Direction,
        target: Text,
        lists: [Vec<u64>; 3],
        notify: Option<&Bound<'_, TransferNotify>>,
    ) -> PyResult<i32> {
        let notify = notify.map(|notify| {
            let words = notify.get().words();
            (words.name, words.msg)
        });
        self.run(py, |engine, interrupt| {
            engine
                .transfer(&Call { direction, target: &target.0, lists: &lists, notify }, interrupt)
        })
    }

    fn submit(
        &self,
        py: Python<'_>,
        direction: Direction,
        target: Text,
        lists: [Vec<u64>; 3],
    ) -> PyResult<u64> {
        self.run(py, |engine, interrupt| {
            let call = Call { direction, target: &target.0, lists: &lists, notify: None };
            engine.submit(&call, interrupt)
        })
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "they are the arguments of Mooncake's calls")]
impl TransferEngine {
    #[classattr]
    #[pyo3(name = "TransferOpcode")]
    fn transfer_opcode(py: Python<'_>) -> Py<PyType> {
        py.get_type::<TransferOpcode>().unbind()
    }

    #[new]
    fn new(py: Python<'_>) -> Self {
        let engine = Arc::new(MooncakeEngine::new());
        blocking::stop_at_exit(py, &engine);
        Self(Held::new(&engine))
    }

    /// Starts the engine, or starts it anew. 0, or -1.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, /))]
    fn initialize(
        &self,
        py: Python<'_>,
        local_hostname: Text,
        metadata_server: Text,
        protocol: Option<Text>,
        device_name: Option<Text>,
    ) -> PyResult<i32> {
        let _ = device_name;
        let protocol = protocol.unwrap_or(Text(String::new()));
        self.run(py, |engine, interrupt| {
            engine.initialize(&local_hostname.0, &metadata_server.0, &protocol.0, interrupt)
        })
    }

    /// `initialize` with the kind of metadata server given apart. 0, or -1.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, metadata_type, /))]
    fn initialize_ext(
        &self,
        py: Python<'_>,
        local_hostname: Text,
        metadata_server: Text,
        protocol: Option<Text>,
        device_name: Option<Text>,
        metadata_type: Text,
    ) -> PyResult<i32> {
        let server = engine::connection_string(&metadata_type.0, &metadata_server.0);
        self.initialize(py, local_hostname, Text(server), protocol, device_name)
    }

    /// The port to give to peers, 0 before `initialize`.
    fn get_rpc_port(&self) -> i32 {
        self.0.rpc_port().into()
    }

    /// Registers memory. 0; -1 for an empty range; -7 if it overlaps a registered one.
    #[pyo3(signature = (buffer_addr, capacity, location = "*"))]
    fn register_memory(
        &self,
        py: Python<'_>,
        buffer_addr: Number,
        capacity: Number,
        location: &str,
    ) -> PyResult<i32> {
        let _ = location;
        self.run(py, |engine, _| engine.register(&[buffer_addr.0], &[capacity.0]))
    }

    /// Takes the memory at an address out. 0; -3 if none is registered there.
    #[pyo3(signature = (buffer_addr, /))]
    fn unregister_memory(&self, py: Python<'_>, buffer_addr: Number) -> PyResult<i32> {
        self.run(py, |engine, _| engine.unregister(&[buffer_addr.0]))
    }

    /// Registers many, all or none. Codes as `register_memory`.
    #[pyo3(signature = (buffer_addresses, capacities, location = "*"))]
    fn batch_register_memory(
        &self,
        py: Python<'_>,
        buffer_addresses: Numbers,
        capacities: Numbers,
        location: &str,
    ) -> PyResult<i32> {
        let _ = location;
        self.run(py, |engine, _| engine.register(&buffer_addresses.0, &capacities.0))
    }

    /// Takes many out, each even if another fails. 0, or the first failure's code.
    #[pyo3(signature = (buffer_addresses, /))]
    fn batch_unregister_memory(&self, py: Python<'_>, buffer_addresses: Numbers) -> PyResult<i32> {
        self.run(py, |engine, _| engine.unregister(&buffer_addresses.0))
    }

    /// Writes and waits. 0, or -1.
    #[pyo3(signature = (
        target_hostname, buffer, peer_buffer_address, length, transport_hint = ""
    ))]
    fn transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        transport_hint: &str,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        let lists = one(buffer, peer_buffer_address, length);
        self.sync(py, Direction::Write, target_hostname, lists, None)
    }

    /// Reads and waits. 0, or -1.
    #[pyo3(signature = (
        target_hostname, buffer, peer_buffer_address, length, transport_hint = ""
    ))]
    fn transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        transport_hint: &str,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        let lists = one(buffer, peer_buffer_address, length);
        self.sync(py, Direction::Read, target_hostname, lists, None)
    }

    /// Reads or writes and waits; the notification follows the data. 0, or -1.
    #[pyo3(signature = (
        target_hostname, buffer, peer_buffer_address, length, opcode, notify = None, transport_hint = ""
    ))]
    fn transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        opcode: TransferOpcode,
        notify: Option<&Bound<'_, TransferNotify>>,
        transport_hint: &str,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        let lists = one(buffer, peer_buffer_address, length);
        self.sync(py, opcode.into(), target_hostname, lists, notify)
    }

    /// Writes many pieces and waits. 0, or -1 for the whole batch.
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""
    ))]
    fn batch_transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: &str,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        let lists = [buffers.0, peer_buffer_addresses.0, lengths.0];
        self.sync(py, Direction::Write, target_hostname, lists, None)
    }

    /// Reads many pieces and waits. 0, or -1 for the whole batch.
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""
    ))]
    fn batch_transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: &str,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        let lists = [buffers.0, peer_buffer_addresses.0, lengths.0];
        self.sync(py, Direction::Read, target_hostname, lists, None)
    }

    /// Reads or writes many pieces and waits; the notification follows the data. 0, or -1 for the
    /// whole batch.
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify = None, transport_hint = ""
    ))]
    fn batch_transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        opcode: TransferOpcode,
        notify: Option<&Bound<'_, TransferNotify>>,
        transport_hint: &str,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        let lists = [buffers.0, peer_buffer_addresses.0, lengths.0];
        self.sync(py, opcode.into(), target_hostname, lists, notify)
    }

    /// Starts writing many pieces. An id, or 0.
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""
    ))]
    fn batch_transfer_async_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let lists = [buffers.0, peer_buffer_addresses.0, lengths.0];
        self.submit(py, Direction::Write, target_hostname, lists)
    }

    /// Starts reading many pieces. An id, or 0.
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint = ""
    ))]
    fn batch_transfer_async_read(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let lists = [buffers.0, peer_buffer_addresses.0, lengths.0];
        self.submit(py, Direction::Read, target_hostname, lists)
    }

    /// Starts reading or writing many pieces. An id, or 0.
    #[pyo3(signature = (
        target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint = ""
    ))]
    fn batch_transfer_async(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Numbers,
        peer_buffer_addresses: Numbers,
        lengths: Numbers,
        opcode: TransferOpcode,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let lists = [buffers.0, peer_buffer_addresses.0, lengths.0];
        self.submit(py, opcode.into(), target_hostname, lists)
    }

    /// Waits for all of these ids, which are thereby used up. 0, or -1.
    #[pyo3(signature = (batch_ids, /))]
    fn get_batch_transfer_status(&self, py: Python<'_>, batch_ids: Numbers) -> PyResult<i32> {
        self.run(py, |engine, interrupt| engine.wait(&batch_ids.0, interrupt))
    }

    /// Starts one write. An id, or 0.
    #[pyo3(signature = (
        target_hostname, buffer, peer_buffer_address, length, transport_hint = ""
    ))]
    fn transfer_submit_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Number,
        peer_buffer_address: Number,
        length: Number,
        transport_hint: &str,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        let lists = one(buffer, peer_buffer_address, length);
        self.submit(py, Direction::Write, target_hostname, lists)
    }

    /// 1 done, 0 running, -1 failed, -2 out of time. Done and failed ids are used up.
    #[pyo3(signature = (batch_id, /))]
    fn transfer_check_status(&self, py: Python<'_>, batch_id: Number) -> PyResult<i32> {
        self.run(py, |engine, _| engine.check(batch_id.0))
    }

    /// The address of registered memory of at least `length` bytes, or 0.
    #[pyo3(signature = (length, /))]
    fn allocate_managed_buffer(&self, py: Python<'_>, length: Number) -> PyResult<u64> {
        self.run(py, |engine, _| engine.allocate(length.0))
    }

    /// Gives such memory back. 0, or -1 if it was not allocated.
    #[pyo3(signature = (buffer_addr, length, /))]
    fn free_managed_buffer(
        &self,
        py: Python<'_>,
        buffer_addr: Number,
        length: Number,
    ) -> PyResult<i32> {
        let _ = length;
        self.run(py, |engine, _| engine.free(buffer_addr.0))
    }

    /// Copies bytes to an address. 0, or -1 if there are fewer than `length`.
    #[pyo3(signature = (dest_address, src, length, /))]
    fn write_bytes_to_buffer(
        &self,
        dest_address: Number,
        src: &Bound<'_, PyAny>,
        length: Number,
    ) -> PyResult<i32> {
        let Ok(length) = usize::try_from(length.0) else { return Ok(codes::INVALID) };
        let source: Vec<u8>;
        let source: &[u8] = if let Ok(bytes) = src.cast::<PyBytes>() {
            bytes.as_bytes()
        } else if let Ok(text) = src.cast::<PyString>() {
            text.to_str()?.as_bytes()
        } else if let Ok(bytes) = src.cast::<PyByteArray>() {
            source = bytes.to_vec();
            &source
        } else {
            return Err(PyTypeError::new_err("expected bytes, bytearray or str"));
        };
        if source.len() < length || (dest_address.0 == 0 && length > 0) {
            return Ok(codes::INVALID);
        }
        if length > 0 {
            // SAFETY: the source has `length` bytes. That the destination has is the caller's
            // promise, as in Mooncake: this call takes any address of the process.
            unsafe {
                std::ptr::copy_nonoverlapping(source.as_ptr(), pointer(dest_address.0), length);
            }
        }
        Ok(codes::OK)
    }

    /// The bytes at an address.
    #[pyo3(signature = (source_address, length, /))]
    fn read_bytes_from_buffer<'py>(
        &self,
        py: Python<'py>,
        source_address: Number,
        length: Number,
    ) -> PyResult<Bound<'py, PyBytes>> {
        if source_address.0 == 0 || length.0 == 0 {
            return Ok(PyBytes::new(py, &[]));
        }
        let length = usize::try_from(length.0).map_err(|_| PyTypeError::new_err("too long"))?;
        PyBytes::new_with(py, length, |bytes| {
            // SAFETY: `bytes` has `length` bytes. That the source has is the caller's promise, as
            // in Mooncake.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    pointer(source_address.0).cast_const(),
                    bytes.as_mut_ptr(),
                    length,
                );
            }
            Ok(())
        })
    }

    /// The first registered address of a peer, or 0.
    #[pyo3(signature = (segment_name, /))]
    fn get_first_buffer_address(&self, py: Python<'_>, segment_name: Text) -> PyResult<u64> {
        self.run(py, |engine, interrupt| engine.first_address(&segment_name.0, interrupt))
    }

    /// The notifications that have arrived, which are thereby taken.
    fn get_notifies(&self) -> Vec<TransferNotify> {
        let words = |(name, msg)| TransferNotify(Mutex::new(Words { name, msg }));
        self.0.notifications().into_iter().map(words).collect()
    }

    /// Whether a peer is there. 0; -101 if its name is unknown; -102 if it does not answer.
    fn send_probe(&self, py: Python<'_>, peer_server_name: Text) -> PyResult<i32> {
        self.run(py, |engine, interrupt| engine.probe(&peer_server_name.0, interrupt))
    }

    /// This machine as Mooncake describes it, in JSON. There are no network adapters to choose from
    /// here.
    #[pyo3(signature = (device_name = None))]
    fn get_local_topology(&self, device_name: Option<Text>) -> String {
        let _ = device_name;
        engine::local_topology()
    }

    /// Something that stands for the engine, or None before `initialize`.
    fn get_engine(&self) -> Option<InnerTransferEngine> {
        self.0.is_running().then(|| InnerTransferEngine { _engine: Held::new(&self.0) })
    }

    /// A number that stands for the engine, 0 before `initialize`. It is not an address of
    /// anything.
    fn get_engine_ptr(&self) -> u64 {
        self.0.identity()
    }

    /// Nothing to do, 0.
    fn warmup_efa_segment(&self, segment_name: Text) -> i32 {
        let _ = segment_name;
        codes::OK
    }

    /// kvferry's own: why the last call that failed did so, in words; empty if none did.
    fn last_error(&self) -> String {
        self.0.last_error()
    }
}

fn one(buffer: Number, peer_buffer_address: Number, length: Number) -> [Vec<u64>; 3] {
    [vec![buffer.0], vec![peer_buffer_address.0], vec![length.0]]
}

fn pointer(addr: u64) -> *mut u8 {
    usize::try_from(addr).map_or(std::ptr::null_mut(), std::ptr::with_exposed_provenance_mut)
}
