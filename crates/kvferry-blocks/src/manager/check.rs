//! Checks of the manager's invariants, for tests.

use super::BlockManager;
use crate::NONE;
use crate::events::Tier;
use crate::group::Group;
use crate::transfer::Kind;
use crate::tree::Place;

/// Owner of each block of a pool.
struct Owners {
    group: u16,
    pool: &'static str,
    of: Vec<Option<String>>,
}

impl Owners {
    fn new(group: u16, pool: &'static str, blocks: usize) -> Self {
        Self { group, pool, of: vec![None; blocks] }
    }

    fn add(&mut self, block: u32, owner: String) -> Result<(), String> {
        match self.of[block as usize].replace(owner.clone()) {
            None => Ok(()),
            Some(other) => {
                let Self { group, pool, .. } = self;
                Err(format!(
                    "{pool} block {block} of group {group} has two owners: {other}, {owner}"
                ))
            }
        }
    }

    fn all(self) -> Result<(), String> {
        match self.of.iter().position(Option::is_none) {
            None => Ok(()),
            Some(block) => {
                Err(format!("{} block {block} of group {} has no owner", self.pool, self.group))
            }
        }
    }
}

impl BlockManager {
    /// Checks all invariants, in O(n): each block is free, or has one owner; what is held has a prefix that is held; the
    /// queues have what can be evicted, and nothing else. The error says what does not hold.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        for (number, group) in (0..).zip(&self.groups) {
            self.check_blocks(number, group)?;
            self.check_nodes(number, group)?;
        }
        for (at, sequence) in self.sequences.iter() {
            let waits = self.shared.transfers.open_jobs();
            let waits = waits.filter(|(_, entry, _)| entry.waiters.contains(&at)).count();
            if waits != sequence.pending as usize {
                return Err(format!("sequence {at}: {waits} waits, {} pending", sequence.pending));
            }
        }
        Ok(())
    }

    fn check_blocks(&self, number: u16, group: &Group) -> Result<(), String> {
        let mut pages = Owners::new(number, "primary", group.busy.len());
        let slots = group.nodes_max() - group.busy.len();
        let mut slots = Owners::new(number, "secondary", slots);
        for &page in &group.free_pages {
            pages.add(page, "free".into())?;
            if group.busy[page as usize] != NONE {
                return Err(format!("free page {page} of group {number} is under transfer"));
            }
        }
        group.free_slots.iter().try_for_each(|&slot| slots.add(slot, "free".into()))?;
        for (at, node) in group.tree.live().chain(group.tree.dead()) {
            if node.page != NONE {
                pages.add(node.page, format!("node {at}"))?;
            }
            if node.slot != NONE {
                slots.add(node.slot, format!("node {at}"))?;
            }
        }
        for (at, sequence) in self.sequences.iter() {
            let row = &sequence.rows[usize::from(number)];
            for (block, &page) in row.pages.iter().enumerate() {
                let node = row.nodes.get(block).map(|&node| group.tree.node(node));
                if node.is_none_or(|node| node.page != page) {
                    pages.add(page, format!("sequence {at}"))?;
                }
            }
        }
        for (id, entry, job) in self.shared.transfers.open_jobs() {
            if job.group != number {
                continue;
            }
            // A page that a sequence has given up belongs to the transfer.
            if entry.frees_page {
                let block = if job.kind == Kind::Offload { job.from } else { job.to };
                pages.add(block.index, format!("transfer {id}"))?;
            }
            for block in [job.from, job.to] {
                let is_free = match block.tier {
                    Tier::Primary => group.free_pages.contains(&block.index),
                    Tier::Secondary => group.free_slots.contains(&block.index),
                };
                if is_free {
                    return Err(format!(
                        "transfer {id} uses {block:?} of group {number}, a free block"
                    ));
                }
            }
        }
        pages.all()?;
        slots.all()
    }

    fn check_nodes(&self, number: u16, group: &Group) -> Result<(), String> {
        let mut holders = vec![0; group.nodes_max()];
        let rows =
            self.sequences.iter().map(|(_, sequence)| &sequence.rows[usize::from(number)].nodes);
        let pins = self.pins.iter().map(|pin| &pin.nodes[usize::from(number)]);
        rows.chain(pins).flatten().for_each(|&node| holders[node as usize] += 1);
        let jobs = self.shared.transfers.open_jobs();
        for (_, _, job) in jobs.filter(|(_, _, job)| job.group == number) {
            holders[job.node as usize] += u32::from(job.kind == Kind::Partial);
        }
        let mut idle = 0;
        for (at, node) in group.tree.live() {
            let wrong =
                |text: &str| Err(format!("group {number}, node {at} {:?}: {text}", node.key));
            if node.holders != holders[at as usize] {
                return wrong("its holders are counted wrong");
            }
            let children: Vec<u32> = group.tree.children(at).collect();
            let in_primary = |at: &&u32| group.tree.node(**at).place.is_in_primary();
            if children.iter().filter(in_primary).count() as u32 != node.primary_children {
                return wrong("its children in primary are counted wrong");
            }
            if node.primary_children > 0 && !node.place.is_in_primary() {
                return wrong("a child is in primary");
            }
            if children.iter().any(|&child| group.tree.node(child).place == Place::Dead) {
                return wrong("a child is dead");
            }
            let is_idle = node.holders == 0 && node.place == Place::Primary;
            idle += u32::from(is_idle);
            let in_primary_queue = is_idle && node.primary_children == 0;
            let in_secondary_queue =
                node.holders == 0 && node.place == Place::Secondary && children.is_empty();
            if group.primary_queue.key(at).is_some() != in_primary_queue
                || group.secondary_queue.key(at).is_some() != in_secondary_queue
            {
                return wrong("it is in the wrong queue");
            }
            if node.holders > 0 && group.expiring.key(at).is_some() {
                return wrong("its retention may end while it is held");
            }
            let owns = (node.page != NONE, node.slot != NONE, node.transfer != NONE);
            let wanted = match node.place {
                Place::Primary => (true, node.slot_readers > 0, false),
                Place::Secondary => (false, true, false),
                Place::Offloading => (false, true, true),
                Place::Onboarding => (true, true, true),
                Place::Dead => continue,
            };
            if owns != wanted {
                return wrong("it owns other blocks than its place says");
            }
        }
        match idle == group.idle {
            true => Ok(()),
            false => Err(format!("group {number}: {idle} idle nodes, {} counted", group.idle)),
        }
    }
}
