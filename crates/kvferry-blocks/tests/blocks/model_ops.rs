//! What the model does for each call of the manager.

use crate::model::{At, Cached, Holder, Model, Place, Sequence};
use kvferry_blocks::{Key, Retention, RetentionConfig, Tier};

/// Children that are compared for the reuse of a part.
const PARTIAL_CANDIDATES: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    OutOfBlocks,
    AwaitTransfers,
}

/// How many tokens of which block are reused; whether each group takes its page over.
type Part = Option<(usize, Key, Vec<bool>)>;

impl Model {
    /// The sequence, and how many tokens are reused.
    pub(crate) fn allocate(
        &mut self,
        tokens: &[u32],
        salt: u64,
        retention: &RetentionConfig,
    ) -> Result<(u64, u32), Short> {
        let keys = crate::world::keys_of(salt, tokens, self.block);
        let prefix = self.prefix(&keys[..keys.len().min((tokens.len() - 1) / self.block)]);
        let mut part = self.part(prefix, &keys, tokens, salt);
        let blocks = tokens.len().div_ceil(self.block);
        if !self.has_room(&keys[..prefix], blocks, &part) {
            part = None;
            if !self.has_room(&keys[..prefix], blocks, &part) {
                return Err(Short::OutOfBlocks);
            }
        }
        let id = self.next();
        let reused = prefix * self.block + part.as_ref().map_or(0, |(tokens, ..)| *tokens);
        self.sequences.push(Sequence {
            id,
            salt,
            retention: retention.clone(),
            prompt_tokens: tokens.len() as u32,
            tokens: tokens.to_vec(),
            reused: reused as u32,
            rows: vec![Vec::new(); self.groups.len()],
        });
        match self.fill(id, &keys[..prefix], blocks, &part) {
            true => Ok((id, reused as u32)),
            false => {
                self.sequences.retain(|sequence| sequence.id != id);
                Err(Short::AwaitTransfers)
            }
        }
    }

    fn prefix(&self, keys: &[Key]) -> usize {
        let has = |group: usize, at: usize| {
            let parent = at.checked_sub(1).map(|before| keys[before]);
            self.child(group, parent, keys[at]).is_some()
        };
        let all_have = |at: &usize| (0..self.groups.len()).all(|group| has(group, *at));
        (0..keys.len()).take_while(all_have).count()
    }

    fn part(&self, prefix: usize, keys: &[Key], tokens: &[u32], salt: u64) -> Part {
        if !self.config.partial_reuse {
            return None;
        }
        let parent = prefix.checked_sub(1).map(|before| keys[before]);
        let from = prefix * self.block;
        let wanted = &tokens[from..(tokens.len() - 1).min(from + self.block)];
        let by_key = keys
            .get(prefix)
            .filter(|key| self.child(0, parent, **key).is_some_and(Cached::is_readable));
        let mut children = self.children(0, parent);
        children.sort_by_key(|(_, cached)| std::cmp::Reverse(cached.born));
        children.truncate(PARTIAL_CANDIDATES);
        children.retain(|(_, it)| it.is_readable() && (parent.is_some() || it.salt == salt));
        let common = |it: &Cached| {
            it.tokens.iter().zip(wanted).take_while(|(own, wanted)| own == wanted).count()
        };
        let most = children.iter().map(|(_, it)| common(it)).max().unwrap_or(0);
        let by_tokens =
            children.iter().find(|(_, it)| common(it) == most).map(|(key, _)| (most, *key));
        let (count, key) = by_key.map(|key| (wanted.len(), *key)).or(by_tokens)?;
        if count == 0 {
            return None;
        }
        let of_group = |group: usize| {
            let cached = self.child(group, parent, key).filter(|it| it.is_readable())?;
            let takes_over = cached.is_idle() && self.children(group, Some(key)).is_empty();
            (takes_over || self.config.copy_on_partial_reuse).then_some(takes_over)
        };
        let groups: Option<Vec<bool>> = (0..self.groups.len()).map(of_group).collect();
        groups.map(|groups| (count, key, groups))
    }

    fn has_room(&self, prefix: &[Key], blocks: usize, part: &Part) -> bool {
        let of_part = part.as_ref().map(|(_, key, _)| *key);
        (0..self.groups.len()).all(|group| {
            let cached = &self.groups[group].cached;
            let idle = cached.iter().filter(|(key, it)| {
                it.is_idle() && !prefix.contains(key) && of_part != Some(**key)
            });
            let to_onboard = prefix.iter().filter(|key| {
                matches!(cached[key].place, Place::Secondary { .. } | Place::Offloading { .. })
            });
            let taken_over = part.as_ref().is_some_and(|(.., groups)| groups[group]);
            let needed = blocks - prefix.len() + to_onboard.count() - usize::from(taken_over);
            needed <= self.free_pages(group).len() + idle.count()
        })
    }

    /// False: it failed, and was undone.
    fn fill(&mut self, id: u64, prefix: &[Key], blocks: usize, part: &Part) -> bool {
        let groups = 0..self.groups.len();
        let mut parts: Vec<Option<u32>> = vec![None; groups.len()];
        for group in groups.clone() {
            for (at, &key) in prefix.iter().enumerate() {
                self.hold(group, key, Holder::Sequence(id));
                if let Some(retention) = self.worth(id, at) {
                    self.cached(group, key).retention = retention;
                }
            }
            if let Some((_, key, takes_over)) = part {
                let Place::Primary { page } = self.cached(group, *key).place else {
                    self.hold(group, *key, Holder::Copy(id));
                    continue;
                };
                if takes_over[group] {
                    self.remove(group, *key);
                    parts[group] = Some(page);
                    // The sequence owns the page from here on; `try_fill` adds its other pages.
                    self.sequence(id).rows[group].push((page, None));
                } else {
                    self.hold(group, *key, Holder::Copy(id));
                }
            }
        }
        if self.try_fill(id, prefix, blocks, part) {
            return true;
        }
        for group in groups {
            if let Some((_, key, _)) = part {
                self.unhold(group, *key, Holder::Copy(id));
            }
            for key in prefix.iter().rev() {
                let has_page =
                    self.sequence(id).rows[group].iter().any(|block| block.1 == Some(*key));
                if !has_page {
                    self.unhold(group, *key, Holder::Sequence(id));
                }
            }
        }
        self.truncate(id, 0);
        false
    }

    fn try_fill(&mut self, id: u64, prefix: &[Key], blocks: usize, part: &Part) -> bool {
        for group in 0..self.groups.len() {
            for (at, &key) in prefix.iter().enumerate() {
                let place = self.cached(group, key).place;
                if let Place::Secondary { slot } | Place::Offloading { slot, .. } = place {
                    let Some(page) = self.take_page(group) else { return false };
                    let ends = (At::Slot(slot), At::Page(page));
                    let copy = self.copy(group, key, ends, self.block as u32, false);
                    self.cached(group, key).place = Place::Onboarding { page, copy };
                }
                let page = match self.cached(group, key).place {
                    Place::Primary { page } => page,
                    Place::Onboarding { page, copy } => {
                        self.wait(copy, id);
                        page
                    }
                    other => unreachable!("{other:?} was onboarded"),
                };
                self.sequence(id).rows[group].insert(at, (page, Some(key)));
            }
        }
        for group in (0..self.groups.len()).rev() {
            let Some((tokens, key, takes_over)) = part else { break };
            if takes_over[group] {
                continue;
            }
            let Some(page) = self.take_page(group) else { return false };
            let from = match self.cached(group, *key).place {
                Place::Primary { page } => At::Page(page),
                Place::Secondary { slot } => At::Slot(slot),
                other => unreachable!("{other:?} can be read"),
            };
            let copy = self.copy(group, *key, (from, At::Page(page)), *tokens as u32, true);
            let cached = self.cached(group, *key);
            cached.holders.retain(|holder| *holder != Holder::Copy(id));
            cached.holders.push(Holder::Copy(copy));
            self.wait(copy, id);
            self.sequence(id).rows[group].push((page, None));
        }
        self.take_pages(id, blocks)
    }

    fn take_pages(&mut self, id: u64, blocks: usize) -> bool {
        for group in 0..self.groups.len() {
            while self.sequence(id).rows[group].len() < blocks {
                let Some(page) = self.take_page(group) else { return false };
                self.sequence(id).rows[group].push((page, None));
                let mut copies = self.copies.iter_mut().filter(|copy| copy.group == group);
                if let Some(copy) = copies.find(|copy| copy.from == At::Page(page)) {
                    copy.waiters.push(id);
                }
            }
        }
        true
    }

    fn wait(&mut self, copy: u64, id: u64) {
        let copy = self.copies.iter_mut().find(|it| it.id == copy).expect("it has not ended");
        copy.waiters.push(id);
    }

    fn worth(&mut self, id: u64, block: usize) -> Option<Retention> {
        let token = (block * self.block) as u32;
        let sequence = self.sequence(id);
        match token < sequence.prompt_tokens {
            true => sequence.retention.at(token),
            false => Some(sequence.retention.decode_retention()),
        }
    }

    pub(crate) fn append(&mut self, id: u64, tokens: &[u32]) -> Result<(), Short> {
        let had = self.sequence(id).rows[0].len();
        let blocks = (self.sequence(id).tokens.len() + tokens.len()).div_ceil(self.block);
        for group in 0..self.groups.len() {
            let idle = self.groups[group].cached.values().filter(|it| it.is_idle()).count();
            if blocks.saturating_sub(had) > self.free_pages(group).len() + idle {
                return Err(Short::OutOfBlocks);
            }
        }
        if !self.take_pages(id, blocks) {
            self.truncate(id, had);
            return Err(Short::AwaitTransfers);
        }
        self.sequence(id).tokens.extend(tokens);
        Ok(())
    }

    /// How many blocks are stored in all groups.
    pub(crate) fn store(&mut self, id: u64, computed: usize) -> usize {
        let keys = self.keys(id, computed);
        for group in 0..self.groups.len() {
            for at in 0..keys.len() {
                if self.sequence(id).rows[group][at].1.is_none()
                    && !self.store_one(id, group, at, &keys)
                {
                    break;
                }
            }
        }
        let rows = self.sequence(id).rows.iter();
        rows.map(|row| row.iter().filter(|block| block.1.is_some()).count()).min().unwrap_or(0)
    }

    fn store_one(&mut self, id: u64, group: usize, at: usize, keys: &[Key]) -> bool {
        let (key, page) = (keys[at], self.sequence(id).rows[group][at].0);
        if self.is_touched(group, At::Page(page)) {
            return false;
        }
        let worth = self.worth(id, at);
        match self.groups[group].cached.get_mut(&key) {
            Some(cached) => {
                match cached.place {
                    Place::Primary { .. } => {}
                    Place::Secondary { .. } if cached.holders.is_empty() => {
                        cached.place = Place::Primary { page };
                        cached.announced = Tier::Primary;
                    }
                    _ => return false,
                }
                cached.retention = worth.unwrap_or(cached.retention);
                self.hold(group, key, Holder::Sequence(id));
            }
            None => {
                let (born, block) = (self.next(), self.block);
                let sequence = self.sequence(id);
                let cached = Cached {
                    parent: at.checked_sub(1).map(|before| keys[before]),
                    salt: sequence.salt,
                    tokens: sequence.tokens[at * block..(at + 1) * block].to_vec(),
                    place: Place::Primary { page },
                    holders: vec![Holder::Sequence(id)],
                    retention: worth.unwrap_or_default(),
                    until_ms: None,
                    last_use: 0,
                    born,
                    announced: Tier::Primary,
                };
                self.groups[group].cached.insert(key, cached);
            }
        }
        self.sequence(id).rows[group][at].1 = Some(key);
        true
    }

    pub(crate) fn free(&mut self, id: u64, computed: usize, now_ms: u64) {
        self.store(id, computed);
        self.advance(now_ms);
        self.truncate(id, 0);
        self.sequences.retain(|sequence| sequence.id != id);
    }

    pub(crate) fn pin(&mut self, id: u64) {
        if !self.is_ready(id) {
            return;
        }
        let pin = self.next();
        for group in 0..self.groups.len() {
            let keys: Vec<Key> =
                self.sequence(id).rows[group].iter().filter_map(|it| it.1).collect();
            keys.into_iter().for_each(|key| self.hold(group, key, Holder::Pin(pin)));
        }
        self.pins.push(pin);
    }

    pub(crate) fn unpin(&mut self, at: usize) {
        let pin = self.pins.swap_remove(at);
        for group in 0..self.groups.len() {
            // The deepest one first: a prefix has fewer tokens than what is behind it.
            let pinned = |it: &Cached| it.holders.contains(&Holder::Pin(pin));
            let cached = self.groups[group].cached.iter();
            let mut keys: Vec<Key> =
                cached.filter(|(_, it)| pinned(it)).map(|(key, _)| *key).collect();
            keys.sort_by_key(|key| std::cmp::Reverse(key.0[1]));
            keys.into_iter().for_each(|key| self.unhold(group, key, Holder::Pin(pin)));
        }
    }
}
