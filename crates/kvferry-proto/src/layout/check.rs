//! The checks that a layout must pass.

use super::{
    GROUPS_MAX, Group, Kind, LAYER_NAME_MAX, LAYERS_MAX, Layer, Layout, PLANES_MAX, Plane,
    REGIONS_MAX, SHORT_NAME_MAX,
};
use crate::id::RegionId;
use crate::text::sanitized;
use std::collections::HashSet;
use std::fmt::Display;
use std::hash::Hash;
use thiserror::Error;

/// The largest context-parallel world.
pub(crate) const CONTEXT_MAX: u32 = 4096;

/// Error for a layout that is not valid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum LayoutError {
    /// A count beyond its limit.
    #[error("{count} {what} are beyond the limit of {limit}")]
    TooMany { what: &'static str, count: usize, limit: usize },
    /// A layer without planes.
    #[error("layer {0} has no planes")]
    NoPlanes(String),
    /// A name that is empty, too long or not printable.
    #[error("the name of a {what} is not 1 to {limit} printable bytes: {name:?}")]
    Name { what: &'static str, name: String, limit: usize },
    /// Two parts with the same name or id.
    #[error("two {what}s have the name {name}")]
    Twice { what: &'static str, name: String },
    /// A region with the reserved id.
    #[error("a region has the id 0, which is reserved for absolute addresses")]
    Absolute,
    /// A group out of its ranges.
    #[error("group {group}: {fault}")]
    Group { group: String, fault: Fault },
    /// A layer in a group that does not exist.
    #[error("layer {layer} is in group {group}, but there are only {groups} groups")]
    NoGroup { layer: String, group: usize, groups: usize },
    /// A plane out of its ranges or bounds.
    #[error("layer {layer}, plane {plane}: {fault}")]
    Plane { layer: String, plane: String, fault: Fault },
}

/// Error in a group or plane.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Fault {
    /// A number is zero.
    #[error("{0} is zero")]
    Zero(&'static str),
    /// A number is beyond its range.
    #[error("{what} is {value}, at most {limit} is allowed")]
    TooLarge { what: &'static str, value: u64, limit: u64 },
    /// A number does not divide another.
    #[error("{divisor} {what} do not divide {value} {of}")]
    Indivisible { what: &'static str, divisor: u32, of: &'static str, value: u32 },
    /// A state is spread over context-parallel ranks, although it has no tokens.
    #[error("a state cannot be spread over {0} context-parallel ranks")]
    SpreadState(u32),
    /// A state is split into kernel blocks, although it has no tokens.
    #[error("a state cannot be split into {0} kernel blocks")]
    SplitState(u32),
    /// Heads beyond those of the model.
    #[error("{count} heads from head {start} on are beyond the model's {total} heads")]
    Heads { start: u32, count: u32, total: u32 },
    /// A region that does not exist.
    #[error("it lies in region {region}, but there are only {regions} regions")]
    NoRegion { region: usize, regions: usize },
    /// The last byte is beyond the region's; `end` is the largest number for beyond 2⁶⁴.
    #[error("it ends {end} bytes into a region of {len}")]
    Bounds { end: u64, len: u64 },
    /// Two elements overlap.
    #[error("the {axis} stride is {stride}, but what it steps over takes {extent} bytes")]
    Overlap { axis: &'static str, stride: u64, extent: u64 },
}

/// Checks that `name` is 1 to `limit` printable bytes.
pub(crate) fn is_name(name: &str, limit: usize) -> bool {
    !name.is_empty() && name.len() <= limit && sanitized(name, limit) == name
}

/// Any name, with unprintable characters replaced.
pub(crate) fn printable(name: &str) -> String {
    sanitized(name, LAYER_NAME_MAX)
}

pub(super) fn layout(layout: &Layout) -> Result<(), LayoutError> {
    count("regions", layout.regions.len(), REGIONS_MAX)?;
    count("groups", layout.groups.len(), GROUPS_MAX)?;
    count("layers", layout.layers.len(), LAYERS_MAX)?;
    if layout.regions.iter().any(|region| region.id == RegionId::ABSOLUTE) {
        return Err(LayoutError::Absolute);
    }
    unique("region", layout.regions.iter().map(|region| region.id))?;
    for it in &layout.groups {
        name("group", &it.name, SHORT_NAME_MAX)?;
        group(it).map_err(|fault| LayoutError::Group { group: it.name.clone(), fault })?;
    }
    unique("group", layout.groups.iter().map(|group| group.name.as_str()))?;
    for it in &layout.layers {
        name("layer", &it.name, LAYER_NAME_MAX)?;
        layer(it, layout)?;
    }
    unique("layer", layout.layers.iter().map(|layer| layer.name.as_str()))
}

fn group(group: &Group) -> Result<(), Fault> {
    nonzero("tokens of a block", group.block_tokens)?;
    nonzero("blocks", group.blocks)?;
    // The id after the last is the one that means none.
    within("blocks", group.blocks.into(), u64::from(u32::MAX))?;
    match group.kind {
        Kind::Window { tokens } => nonzero("window", tokens)?,
        Kind::Chunk { tokens } => nonzero("chunk", tokens)?,
        Kind::Full | Kind::State => {}
    }
    let context = group.context;
    nonzero("context-parallel ranks", context.size)?;
    within("context-parallel ranks", context.size.into(), CONTEXT_MAX.into())?;
    within("context-parallel rank", context.rank.into(), u64::from(context.size) - 1)?;
    if context.size > 1 && group.kind == Kind::State {
        return Err(Fault::SpreadState(context.size));
    }
    let run = context.run(group.block_tokens);
    divides("tokens dealt out", run, "tokens of a block", group.block_tokens)
}

fn layer(layer: &Layer, layout: &Layout) -> Result<(), LayoutError> {
    let Some(group) = layout.groups.get(layer.group) else {
        return Err(LayoutError::NoGroup {
            layer: layer.name.clone(),
            group: layer.group,
            groups: layout.groups.len(),
        });
    };
    count("planes", layer.planes.len(), PLANES_MAX)?;
    if layer.planes.is_empty() {
        return Err(LayoutError::NoPlanes(layer.name.clone()));
    }
    for it in &layer.planes {
        name("plane", &it.role, SHORT_NAME_MAX)?;
        name("encoding", &it.encoding.name, SHORT_NAME_MAX)?;
        plane(it, group, layout).map_err(|fault| LayoutError::Plane {
            layer: layer.name.clone(),
            plane: it.role.clone(),
            fault,
        })?;
    }
    unique("plane", layer.planes.iter().map(|plane| plane.role.as_str()))
}

fn plane(plane: &Plane, group: &Group, layout: &Layout) -> Result<(), Fault> {
    nonzero("bits of an element", plane.encoding.bits)?;
    nonzero("content", plane.content)?;
    nonzero("rows", plane.rows)?;
    let heads = plane.heads;
    if heads.count == 0 || heads.start.checked_add(heads.count).is_none_or(|end| end > heads.total)
    {
        let (start, count, total) = (heads.start, heads.count, heads.total);
        return Err(Fault::Heads { start, count, total });
    }
    let split = plane.view.kernel_blocks;
    nonzero("kernel blocks", split)?;
    divides("kernel blocks", split, "rows", plane.rows)?;
    if group.kind == Kind::State {
        if split > 1 {
            return Err(Fault::SplitState(split));
        }
    } else {
        divides("kernel blocks", split, "tokens of a block", group.block_tokens)?;
        // A row must not belong to two ranks.
        let row_tokens = group.block_tokens / gcd(group.block_tokens, plane.rows);
        let run = group.context.run(group.block_tokens);
        divides("tokens of a row", row_tokens, "tokens dealt out", run)?;
    }
    let Some(region) = layout.regions.get(plane.view.region) else {
        let (region, regions) = (plane.view.region, layout.regions.len());
        return Err(Fault::NoRegion { region, regions });
    };
    geometry(plane, group.blocks, region.len)
}

/// Checks that the plane ends within the region and no two of its elements share a byte.
///
/// Each stride must be at least as long as all that the smaller strides reach. Arrays that
/// interleave without being nested are refused as well: no engine has them.
fn geometry(plane: &Plane, blocks: u32, len: u64) -> Result<(), Fault> {
    let view = &plane.view;
    let mut axes = [
        ("row", plane.rows / view.kernel_blocks, view.row_stride),
        ("head", plane.heads.count, view.head_stride),
        ("kernel block", view.kernel_blocks, view.kernel_stride),
        ("block", blocks, view.block_stride),
    ];
    axes.sort_by_key(|&(_, _, stride)| stride);
    let mut extent = u64::from(plane.content);
    for (axis, count, stride) in axes.into_iter().filter(|&(_, count, _)| count > 1) {
        if stride < extent {
            return Err(Fault::Overlap { axis, stride, extent });
        }
        let reach = stride.checked_mul(u64::from(count) - 1);
        let grown = reach.and_then(|reach| extent.checked_add(reach));
        extent = grown.ok_or(Fault::Bounds { end: u64::MAX, len })?;
    }
    match view.base.checked_add(extent) {
        Some(end) if end <= len => Ok(()),
        end => Err(Fault::Bounds { end: end.unwrap_or(u64::MAX), len }),
    }
}

pub(crate) const fn gcd(a: u32, b: u32) -> u32 {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

const fn count(what: &'static str, count: usize, limit: usize) -> Result<(), LayoutError> {
    if count > limit { Err(LayoutError::TooMany { what, count, limit }) } else { Ok(()) }
}

pub(super) fn name(what: &'static str, name: &str, limit: usize) -> Result<(), LayoutError> {
    if is_name(name, limit) {
        Ok(())
    } else {
        Err(LayoutError::Name { what, name: printable(name), limit })
    }
}

fn unique<T: Copy + Hash + Eq + Display>(
    what: &'static str,
    names: impl Iterator<Item = T>,
) -> Result<(), LayoutError> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(LayoutError::Twice { what, name: name.to_string() });
        }
    }
    Ok(())
}

const fn nonzero(what: &'static str, value: u32) -> Result<(), Fault> {
    if value == 0 { Err(Fault::Zero(what)) } else { Ok(()) }
}

const fn within(what: &'static str, value: u64, limit: u64) -> Result<(), Fault> {
    if value > limit { Err(Fault::TooLarge { what, value, limit }) } else { Ok(()) }
}

const fn divides(
    what: &'static str,
    divisor: u32,
    of: &'static str,
    value: u32,
) -> Result<(), Fault> {
    if value.is_multiple_of(divisor) {
        Ok(())
    } else {
        Err(Fault::Indivisible { what, divisor, of, value })
    }
}
