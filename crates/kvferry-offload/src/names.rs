//! Under which names blocks are written.

use crate::options::Options;
use kvferry_store::Namespace;
use std::io;

/// Names of one driver.
#[derive(Debug)]
pub(crate) struct Names {
    namespace: Namespace,
    shares: bool,
    /// Random bytes, which no other driver has.
    driver: [u8; 16],
}

impl Names {
    pub(crate) fn new(options: &Options) -> io::Result<Self> {
        Ok(Self {
            namespace: options.namespace.clone(),
            shares: options.shares_names,
            driver: kvferry_sys::random::bytes()?,
        })
    }

    /// The namespace of blocks of a group that were stored after so many resets of the manager.
    pub(crate) fn of(&self, group: u16, resets: u32) -> Namespace {
        let namespace = self.namespace.clone().group(group.into());
        if self.shares && resets == 0 {
            return namespace;
        }
        namespace.epoch([&self.driver[..], &resets.to_le_bytes()].concat())
    }

    /// The driver's folder in a directory of files.
    pub(crate) fn folder(&self) -> String {
        format!("{FOLDER}{:032x}", u128::from_be_bytes(self.driver))
    }
}

const FOLDER: &str = "kvferry-files-";

/// Whether a driver has made a folder of this name.
pub(crate) fn is_folder(name: &str) -> bool {
    let hex = name.strip_prefix(FOLDER).unwrap_or_default();
    hex.len() == 32 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(shares: bool) -> Names {
        let options = Options::new(Namespace::new("model"));
        Names::new(&if shares { options.share_names() } else { options }).unwrap()
    }

    #[test]
    fn every_driver_and_every_reset_has_names_of_its_own() {
        let (one, other) = (names(false), names(false));
        assert_eq!(one.of(0, 0), one.of(0, 0));
        for different in [one.of(1, 0), one.of(0, 1), other.of(0, 0), Namespace::new("model")] {
            assert_ne!(one.of(0, 0).digest(), different.digest());
        }
    }

    #[test]
    fn names_are_shared_where_asked_until_the_first_reset() {
        let (one, other) = (names(true), names(true));
        assert_eq!(one.of(2, 0), other.of(2, 0));
        assert_ne!(one.of(2, 1), other.of(2, 1));
        assert_ne!(one.of(2, 1), one.of(2, 0));
    }

    #[test]
    fn only_folders_of_drivers_are_taken_for_such() {
        assert!(is_folder(&names(false).folder()));
        for other in ["kvferry-files-", "kvferry-files-01", "0123456789abcdef0123456789abcdef"] {
            assert!(!is_folder(other), "{other}");
        }
    }
}
