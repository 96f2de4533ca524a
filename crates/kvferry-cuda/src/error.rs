//! Why a range of memory, or an edge, can't be used.

use kvferry_sys::cuda;

/// A range that is not a GPU's memory as kvferry copies it, or a driver that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver, or what it says of the range or the edge.
    #[error(transparent)]
    Driver(#[from] cuda::Error),
    /// Host memory.
    #[error("{address:#x} is {kind} host memory, not memory of a GPU; register it as host memory")]
    HostMemory {
        /// Start of the range.
        address: u64,
        /// `pinned` or `pageable`.
        kind: &'static str,
    },
    /// Memory whose pages the driver moves.
    #[error(
        "{address:#x} is managed memory, whose pages move between GPU and host; allocate it with cudaMalloc"
    )]
    Managed {
        /// Start of the range.
        address: u64,
    },
    /// Memory of another GPU than the caller named.
    #[error("{address:#x} is memory of GPU {owner}, not of GPU {named}; name its owner")]
    OtherDevice {
        /// Start of the range.
        address: u64,
        /// Number of the GPU that owns the range.
        owner: i32,
        /// Number that the caller named.
        named: i32,
    },
    /// A batch with memory of a GPU, of which the caller has not said what it comes after.
    #[error(
        "the batch has memory of GPU {device}: say what the transfer comes after, a stream or an event, or that the host \
         has waited"
    )]
    NoOrder {
        /// Number of the GPU.
        device: i32,
    },
    /// The GPU failed so that this process can't use it any more.
    #[error("GPU {device} is lost to this process ({why}); restart the process")]
    Lost {
        /// Number of the GPU.
        device: i32,
        /// The error that the driver reported first.
        why: String,
    },
    /// All stages that are in reserve or free are out of use.
    #[error(
        "GPU {device} has no host memory to copy through: the driver has it for registered, though it is not; restart the \
         process"
    )]
    NoStage {
        /// Number of the GPU.
        device: i32,
    },
    /// The process is short of threads or address space.
    #[error("GPU {device} can't be used: {why}")]
    Host {
        /// Number of the GPU.
        device: i32,
        /// The system's error.
        why: String,
    },
}

impl From<&'static cuda::Unavailable> for Error {
    fn from(why: &'static cuda::Unavailable) -> Self {
        Self::Driver(why.into())
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}
