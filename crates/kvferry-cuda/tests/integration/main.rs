//! Plans, calibrations, the kernel's text and plain copies. What moves memory in transfers is tested in `tests/gpu/`.

mod calibrations;
mod kernel;
mod plans;
mod raw;
