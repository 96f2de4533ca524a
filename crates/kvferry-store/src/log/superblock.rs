//! A store's directories: the superblock of each, and the names of the segments' files.
//!
//! Creating and upgrading a store replaces the superblocks' files. The caller holds a lock on the store
//! meanwhile.

use super::format::{Geometry, VERSION, array_at, u32_at, u64_at};
use super::{Error, Result};
use crate::fault_points::{Op, step, sync_directory};
use crate::opening::owner::{self, FileUser};
use crate::tiers::disk::gate::GivenUp;
use kvferry_sys::private;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

/// The superblock's file.
pub const FILE: &str = "kvferry.store";
/// A superblock that is being written. What an interrupted write left here is overwritten.
pub const NEW_FILE: &str = "kvferry.store.new";

const MAGIC: [u8; 8] = *b"kvfstore";
/// The magic and the version, which each format has here.
const PREFIX_BYTES: usize = 16;
const BYTES: usize = 72;
const BYTES_V2: usize = 64;
/// More than any format has. What is longer is damaged.
const BYTES_MAX: u64 = 1 << 16;

/// Identity of a directory: its store, and its number among the store's directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Random; each segment carries it.
    pub store: [u8; 16],
    /// The size of the segments.
    pub geometry: Geometry,
    /// Creation time of the store, Unix milliseconds.
    pub created_ms: u64,
    /// The number of the directory, from 0 on.
    pub directory: u32,
    /// Number of directories that the store has. 0 in format 1, which does not record it.
    pub directories: u32,
    /// Random id of this directory. It tells a device from another one that was in its place before. 0 in
    /// earlier formats, and while the store is being made.
    pub id: u64,
}

/// Reads the superblock of an older format.
struct Upgrade {
    from: u32,
    decode: fn(&[u8]) -> Option<Superblock>,
}

/// The older formats that this release reads.
const UPGRADES: &[Upgrade] =
    &[Upgrade { from: 1, decode: decode_v1 }, Upgrade { from: 2, decode: decode_v2 }];

impl Superblock {
    /// The superblock of a store's directory and the format that it has there, which may be older than
    /// this release's. `None` if there is no store in the directory. Any user's.
    pub fn read(directory: &Path) -> Result<Option<(Self, u32)>> {
        read(private::open(&directory.join(FILE), false))
    }

    /// Like [`Superblock::read`], but `Refused` if the file is not this user's alone.
    pub(crate) fn read_own(directory: &Path, user: &FileUser) -> Result<Option<(Self, u32)>> {
        read(owner::open(&directory.join(FILE), false, user))
    }

    /// Makes `directory`, which exists, a store's. The superblock that it may have is replaced.
    pub fn write(&self, directory: &Path) -> Result<()> {
        self.replace(directory, &GivenUp::default())
            .map_err(|source| Error::Directory { doing: "write kvferry.store", source })
    }

    /// Like [`Superblock::write`], but fails once `given_up` is set.
    pub(crate) fn replace(&self, directory: &Path, given_up: &GivenUp) -> io::Result<()> {
        let (new, to) = (directory.join(NEW_FILE), directory.join(FILE));
        let bytes = self.encode();
        let reached = || given_up.check().and_then(|()| reached());
        reached()?;
        // A new file: a link in its place is not followed, and nothing of another user is written to.
        let create = || {
            match fs::remove_file(&new) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            private::create(&new)
        };
        let mut file = step(|| Op::Create { path: new.clone(), len: 0 }, create)?;
        reached()?;
        step(|| Op::write(new.clone(), 0, &bytes), || file.write_all(&bytes))?;
        reached()?;
        step(|| Op::Sync(new.clone()), || file.sync_all())?;
        reached()?;
        let rename = || Op::Rename { from: new.clone(), to: to.clone() };
        step(rename, || fs::rename(&new, &to))?;
        reached()?;
        sync_directory(directory)
    }

    fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(!VERSION).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.store);
        bytes[32..40].copy_from_slice(&self.geometry.segment_bytes().to_le_bytes());
        bytes[40..48].copy_from_slice(&self.created_ms.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.directory.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.directories.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.id.to_le_bytes());
        let crc = crc_fast::crc64_nvme(&bytes[..64]);
        bytes[64..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; BYTES] = bytes.try_into().ok()?;
        let holds = crc_fast::crc64_nvme(&bytes[..64]) == u64_at(bytes, 64);
        let id = u64_at(bytes, 56);
        holds.then(|| Some(Self { id, ..Self::decode_numbered(bytes)? })).flatten()
    }

    /// The fields that formats from version 2 on have.
    fn decode_numbered(bytes: &[u8]) -> Option<Self> {
        let (directory, directories) = (u32_at(bytes, 48), u32_at(bytes, 52));
        let superblock = Self { directory, directories, ..Self::decode_fields(bytes)? };
        (directory < directories).then_some(superblock)
    }

    /// The fields that all formats have.
    fn decode_fields(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            store: array_at(bytes, 16),
            geometry: Geometry::new(u64_at(bytes, 32))?,
            created_ms: u64_at(bytes, 40),
            directory: 0,
            directories: 0,
            id: 0,
        })
    }
}

fn decode_v1(bytes: &[u8]) -> Option<Superblock> {
    let bytes: &[u8; 56] = bytes.try_into().ok()?;
    let holds = crc_fast::crc64_nvme(&bytes[..48]) == u64_at(bytes, 48);
    holds.then(|| Superblock::decode_fields(bytes)).flatten()
}

fn decode_v2(bytes: &[u8]) -> Option<Superblock> {
    let bytes: &[u8; BYTES_V2] = bytes.try_into().ok()?;
    let holds = crc_fast::crc64_nvme(&bytes[..56]) == u64_at(bytes, 56);
    holds.then(|| Superblock::decode_numbered(bytes)).flatten()
}

/// A point where tests let the power fail.
#[cfg(not(test))]
fn reached() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use cut::reached;

/// Power that fails after a number of steps of this thread.
#[cfg(test)]
pub(crate) mod cut {
    use kvferry_sys::sync::Mutex;
    use std::cell::RefCell;
    use std::io;
    use std::sync::Arc;

    /// The steps that are left, of a thread and of those that work for it.
    type SharedSteps = Arc<Mutex<Option<u32>>>;

    thread_local!(static LEFT: RefCell<SharedSteps> = RefCell::default());

    /// Lets the power fail after `steps` of this thread. `None`: it does not fail.
    pub(crate) fn after(steps: Option<u32>) {
        *current().lock() = steps;
    }

    pub(crate) fn current() -> SharedSteps {
        LEFT.with_borrow(Arc::clone)
    }

    /// Lets this thread count its steps with those of another one, for which it works.
    pub(crate) fn follow(other: SharedSteps) {
        LEFT.set(other);
    }

    pub(crate) fn reached() -> io::Result<()> {
        match &mut *current().lock() {
            None => Ok(()),
            Some(0) => Err(io::Error::other("the power has failed")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}

fn read(opened: io::Result<File>) -> Result<Option<(Superblock, u32)>> {
    let bytes = opened.and_then(|file| {
        let mut bytes = Vec::new();
        file.take(BYTES_MAX).read_to_end(&mut bytes).map(|_| bytes)
    });
    match bytes {
        Ok(bytes) => decode(&bytes, UPGRADES).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if owner::is_refused(&error) => Err(Error::Refused(error.to_string())),
        Err(source) => Err(Error::Directory { doing: "read kvferry.store", source }),
    }
}

/// The superblock and the version that its bytes have.
fn decode(bytes: &[u8], upgrades: &[Upgrade]) -> Result<(Superblock, u32)> {
    let magic = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(magic) {
        return Err(Error::Foreign { file: FILE });
    }
    let damaged = Error::Damaged(FILE);
    if bytes.len() < PREFIX_BYTES || u32_at(bytes, 8) != !u32_at(bytes, 12) {
        return Err(damaged);
    }
    let version = u32_at(bytes, 8);
    let superblock = match version {
        VERSION => Superblock::decode(bytes),
        found if found > VERSION => return Err(Error::NewerFormat { found, known: VERSION }),
        found => match upgrades.iter().find(|upgrade| upgrade.from == found) {
            Some(upgrade) => (upgrade.decode)(bytes),
            None => return Err(Error::UnknownFormat { found }),
        },
    };
    Ok((superblock.ok_or(damaged)?, version))
}

/// Rewrites an encoded superblock to format 2.
#[cfg(test)]
pub(crate) fn downgrade_to_2(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes[..56].to_vec();
    bytes[8..16].copy_from_slice(b"\x02\0\0\0\xfd\xff\xff\xff");
    let sum = crc_fast::crc64_nvme(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Rewrites an encoded superblock to format 1.
#[cfg(test)]
pub(crate) fn downgrade_bytes(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes[..48].to_vec();
    bytes[8..16].copy_from_slice(b"\x01\0\0\0\xfe\xff\xff\xff");
    let sum = crc_fast::crc64_nvme(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// The name of a segment's file.
pub fn segment_file(segment: u32) -> String {
    format!("segment-{segment:08}")
}

/// The segment that a file's name names, if it is a segment's.
pub fn segment_of(file: &str) -> Option<u32> {
    let segment = file.strip_prefix("segment-")?.parse().ok()?;
    (segment_file(segment) == file).then_some(segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Superblock {
        let geometry = Geometry::new(64 << 20).expect("the size is in bounds");
        let (directory, directories) = (1, 3);
        let store = *b"0123456789abcdef";
        let id = 0x0123_4567_89ab_cdef;
        Superblock { store, geometry, created_ms: 1_763_900_000_000, directory, directories, id }
    }

    /// The bytes that the first release wrote for `store`.
    fn bytes_of_version_1() -> Vec<u8> {
        downgrade_bytes(&store().encode())
    }

    fn with_version(version: u32) -> Vec<u8> {
        let mut bytes = store().encode();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[12..16].copy_from_slice(&(!version).to_le_bytes());
        bytes.to_vec()
    }

    fn directory(name: &str) -> std::path::PathBuf {
        let path =
            std::env::temp_dir().join(format!("kvferry-superblock-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_superblock_that_was_written_is_read_again_also_over_an_interrupted_write() {
        let directory = directory("round-trip");
        assert_eq!(Superblock::read(&directory).unwrap(), None);
        fs::write(directory.join(NEW_FILE), [0xff; 100]).unwrap();
        assert_eq!(Superblock::read(&directory).unwrap(), None);
        store().write(&directory).unwrap();
        assert_eq!(Superblock::read(&directory).unwrap(), Some((store(), VERSION)));
        assert!(!directory.join(NEW_FILE).exists());
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_superblock_is_for_its_user_alone_and_no_link_is_followed_when_it_is_written() {
        use std::os::unix::fs::PermissionsExt;
        let directory = directory("link");
        let victim = directory.join("victim");
        fs::write(&victim, "of another user").unwrap();
        std::os::unix::fs::symlink(&victim, directory.join(NEW_FILE)).unwrap();
        store().write(&directory).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"of another user");
        let mode = fs::metadata(directory.join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn the_bytes_of_version_3_do_not_change() {
        let bytes = store().encode();
        assert_eq!(bytes[..32], *b"kvfstore\x03\0\0\0\xfc\xff\xff\xff0123456789abcdef");
        assert_eq!(bytes[48..64], *b"\x01\0\0\0\x03\0\0\0\xef\xcd\xab\x89\x67\x45\x23\x01");
        assert_eq!(crc_fast::crc64_nvme(&bytes), 0x0cef_cfc4_d490_91bd);
    }

    #[test]
    fn version_2_is_read_as_it_was_written() {
        let bytes = downgrade_to_2(&store().encode());
        assert_eq!(bytes[..32], *b"kvfstore\x02\0\0\0\xfd\xff\xff\xff0123456789abcdef");
        assert_eq!((bytes.len(), crc_fast::crc64_nvme(&bytes)), (64, 0x0cef_cfc4_d490_91bd));
        assert_eq!(decode(&bytes, UPGRADES).unwrap(), (Superblock { id: 0, ..store() }, 2));
        for len in 16..bytes.len() {
            assert!(matches!(decode(&bytes[..len], UPGRADES), Err(Error::Damaged(FILE))));
        }
    }

    #[test]
    fn version_1_is_read_as_it_was_written() {
        let bytes = bytes_of_version_1();
        assert_eq!(crc_fast::crc64_nvme(&bytes), 0x0cef_cfc4_d490_91bd);
        let old = Superblock { directory: 0, directories: 0, id: 0, ..store() };
        assert_eq!(decode(&bytes, UPGRADES).unwrap(), (old, 1));
        for len in 16..bytes.len() {
            assert!(matches!(decode(&bytes[..len], UPGRADES), Err(Error::Damaged(FILE))));
        }
    }

    #[test]
    fn a_number_that_is_not_below_the_count_is_damage() {
        for (directory, directories) in [(0, 0), (1, 1), (7, 3)] {
            let bytes = Superblock { directory, directories, ..store() }.encode();
            assert!(matches!(decode(&bytes, UPGRADES), Err(Error::Damaged(FILE))));
        }
    }

    #[test]
    fn a_newer_format_is_refused_with_its_version() {
        let mut bytes = with_version(7);
        bytes.truncate(20);
        match decode(&bytes, UPGRADES) {
            Err(Error::NewerFormat { found: 7, known: VERSION }) => (),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_older_format_is_upgraded_where_it_is_known_and_refused_where_it_is_not() {
        let upgrade = Upgrade {
            from: 0,
            decode: |bytes| (bytes[16..32] == store().store).then_some(store()),
        };
        let (superblock, version) = decode(&with_version(0), &[upgrade]).unwrap();
        assert_eq!((superblock, version), (store(), 0));
        assert!(matches!(
            decode(&with_version(0), UPGRADES),
            Err(Error::UnknownFormat { found: 0 })
        ));
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let foreign: [&[u8]; 3] = [b"{}", b"a file of another program", &[0; 4096]];
        for bytes in foreign {
            assert!(matches!(decode(bytes, UPGRADES), Err(Error::Foreign { file: FILE })));
        }
    }

    #[test]
    fn a_torn_superblock_is_refused_at_each_length_and_with_each_bit_flipped() {
        let whole = store().encode();
        for len in 0..BYTES {
            assert!(matches!(decode(&whole[..len], UPGRADES), Err(Error::Damaged(FILE))));
        }
        for bit in 0..BYTES * 8 {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            match decode(&bytes, UPGRADES) {
                Err(Error::Foreign { .. }) => assert!(bit < 64),
                Err(Error::Damaged(FILE)) => assert!(bit >= 64),
                other => panic!("bit {bit}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_a_typed_error() {
        let error = store().write(Path::new("/dev/null/none")).unwrap_err();
        assert!(matches!(error, Error::Directory { .. }), "{error:?}");
    }

    #[test]
    fn segment_files_have_eight_digits() {
        assert_eq!(segment_file(7), "segment-00000007");
        assert_eq!(segment_of("segment-00000007"), Some(7));
        for other in ["segment-7", "segment-0000000x", "segment-+0000007", "kvferry.store"] {
            assert_eq!(segment_of(other), None);
        }
    }
}
