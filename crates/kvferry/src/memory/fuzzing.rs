//! The oracle for resolving the ranges that a peer names; see `crate::fuzzing`.

use super::region::{Access, Backing, Region};
use super::table::RegionTable;
use kvferry_proto::fuzzing::Script;
use kvferry_proto::{Incarnation, RegionId, WireCode};

/// Registers and unregisters regions and resolves ranges in them: each lookup must find what a
/// linear search finds, and nothing outside a live region.
pub fn regions(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let table = RegionTable::default();
    let mut alive: Vec<Region> = Vec::new();
    while !script.is_empty() {
        match script.below(6) {
            0 | 1 => insert(&table, &mut alive, &mut script),
            2 if !alive.is_empty() => {
                let gone = alive.remove(script.below(256) % alive.len());
                assert!(table.remove(&gone).is_ok() && table.remove(&gone).is_err());
            }
            _ => resolve(&table, &alive, &mut script),
        }
        assert_eq!(table.count(), alive.len());
    }
}

fn insert(table: &RegionTable, alive: &mut Vec<Region>, script: &mut Script<'_>) {
    let base = match script.below(8) {
        0 => usize::MAX - usize::from(script.byte()),
        1 => 0,
        _ => usize::from(script.byte()) * 16,
    };
    let len = usize::from(script.byte()) * script.pick(&[1, 16]);
    let access = script.pick(&[Access::NONE, Access::READ, Access::WRITE, Access::READ_WRITE]);
    let valid = base != 0 && len != 0 && base.checked_add(len).is_some();
    let end = base.saturating_add(len);
    let free = alive.iter().all(|r| end <= r.addr() || r.addr() + r.len() <= base);
    match table.insert(Incarnation(7), base, len, access, Backing::Borrowed) {
        Ok(region) => {
            assert!(valid && free, "{base:#x}+{len:#x}");
            assert!(alive.iter().all(|r| r.id() < region.id()), "an id is never used again");
            alive.push(region);
        }
        Err(e) => assert!(!valid || !free, "{e}"),
    }
}

fn resolve(table: &RegionTable, alive: &[Region], script: &mut Script<'_>) {
    let id = RegionId(u32::from(script.byte()));
    let offset = match script.below(4) {
        0 => u64::MAX - u64::from(script.byte()),
        _ => u64::from(script.short()),
    };
    let len = u32::from(script.byte()) * script.pick(&[1, 16]);
    let need = script.pick(&[Access::READ, Access::WRITE]);
    let expected = naive(alive, id, offset, len, need);
    let tables = table.read();
    let found = tables.resolve(id, offset, len, need);
    match (found, expected) {
        (Ok((region, at)), Ok((expected, expected_at))) => {
            assert_eq!((region.id, at), (expected.id(), expected_at));
            assert!(at + u64::from(len) <= region.len as u64, "the range is inside the region");
        }
        (Err(code), Err(expected)) => assert_eq!(code, expected),
        (found, expected) => panic!("{found:?} where {expected:?} was due"),
    }
}

fn naive(
    alive: &[Region],
    id: RegionId,
    offset: u64,
    len: u32,
    need: Access,
) -> Result<(&Region, u64), WireCode> {
    let end = u128::from(offset) + u128::from(len);
    let wraps = end > u128::from(u64::MAX);
    let absolute = id == RegionId::ABSOLUTE;
    if absolute && wraps {
        return Err(WireCode::Overflow);
    }
    let found = alive.iter().find(|r| {
        if absolute {
            (r.addr() as u64..(r.addr() + r.len()) as u64).contains(&offset)
        } else {
            r.id() == id
        }
    });
    let region = found.ok_or(WireCode::UnknownRegion)?;
    let base = if absolute { region.addr() as u64 } else { 0 };
    if wraps {
        return Err(WireCode::Overflow);
    }
    if end - u128::from(base) > region.len() as u128 {
        return Err(if absolute { WireCode::Straddles } else { WireCode::OutOfBounds });
    }
    let allowed = region.access();
    if (need.read && !allowed.read) || (need.write && !allowed.write) {
        return Err(WireCode::AccessDenied);
    }
    Ok((region, offset - base))
}
