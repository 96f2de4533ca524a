//! What producers say.

use super::entry::Stage;
use super::{Consumer, ConsumerAction};
use crate::code::WireCode;
use crate::handoff::message::{Announced, Offer, Ready, Stop};
use crate::handoff::{Generation, HandoffId, HandoffMessage, Outcome, PeerId};
use crate::origin::Origin;
use crate::time::Timestamp;

impl Consumer {
    /// A message arrived from a peer, over a session with `origin`.
    pub fn receive(
        &mut self,
        from: PeerId,
        origin: Origin,
        message: HandoffMessage,
        now: Timestamp,
    ) {
        self.expire(now);
        match message {
            HandoffMessage::Offer(Offer { id, generation, announced }) => {
                self.announced((from, origin), &id, generation, &announced, true, now);
            }
            HandoffMessage::Ready(Ready { id, generation, announced }) => {
                self.announced((from, origin), &id, generation, &announced, false, now);
            }
            HandoffMessage::Expected(it) => self.expected(from, &it.id),
            HandoffMessage::Confirmed(yes) => self.confirmed(from, &yes.id, yes.generation, now),
            HandoffMessage::Stop(stop) if !stop.by_consumer => self.stopped(from, stop, now),
            // Messages for producers, and messages of later versions.
            HandoffMessage::Ask(_)
            | HandoffMessage::Confirm(_)
            | HandoffMessage::Stop(_)
            | HandoffMessage::Unknown { .. } => {}
        }
    }

    fn announced(
        &mut self,
        (from, origin): (PeerId, Origin),
        id: &HandoffId,
        generation: Generation,
        news: &Announced,
        is_all: bool,
        now: Timestamp,
    ) {
        let Some(entry) = self.handoffs.get_mut(id) else {
            return self.decline(from, id);
        };
        let is_answered = entry.is_answered();
        let Some(source) = entry.sources.get_mut(&from) else { return };
        let settled = matches!(source.stage, Stage::Confirming | Stage::Confirmed);
        if entry.ending.is_some() || settled || generation < source.generation {
            return;
        }
        if generation == Generation::default() {
            let detail = "it announced generation 0, which is none";
            return self.fail(id, Outcome::of(from, WireCode::Malformed, detail), now);
        }
        if generation > source.generation {
            if !is_all {
                // An earlier announcement was lost.
                return self.say(id, from, now);
            }
            if !is_answered {
                self.actions.push_back(ConsumerAction::Answered { id: id.clone() });
            }
            let reads = source.begin(generation);
            self.announced.remove(&(id.clone(), from));
            self.cancel_reads(reads);
        }
        let entry = self.handoffs.get_mut(id).expect("as before");
        let source = entry.sources.get_mut(&from).expect("as before");
        let ahead = news.count.wrapping_sub(source.announced.count).cast_signed();
        if ahead < 0 || (!is_all && ahead == 0) {
            // A message of an earlier connection, or a repeated one.
            return;
        }
        if !is_all && ahead > 1 {
            return self.say(id, from, now);
        }
        if source.announced.last && (!news.last || news.progress != source.announced.progress) {
            let detail = "it goes on after it said that it was complete";
            return self.fail(id, Outcome::of(from, WireCode::Malformed, detail), now);
        }
        if source.is_read() {
            // A repeated announcement after a reconnection.
            return self.go_on(id, from, now);
        }
        let before = source.announced.bytes();
        match source.announced.merge(news, source.need) {
            Ok(()) => {
                // Nothing that was announced becomes less.
                let more = source.announced.bytes() - before;
                if more > 0 {
                    self.hold(id, (from, origin), more, now);
                }
                if self.handoffs.get(id).is_some_and(|entry| entry.ending.is_none()) {
                    self.go_on(id, from, now);
                }
            }
            Err(error) => {
                let outcome = Outcome::of(from, WireCode::Malformed, error.to_string());
                self.fail(id, outcome, now);
            }
        }
    }

    /// The request has arrived at a producer's engine.
    fn expected(&mut self, from: PeerId, id: &HandoffId) {
        match self.handoffs.get_mut(id) {
            Some(entry) => {
                let is_answered = entry.is_answered();
                if let Some(source) = entry.sources.get_mut(&from)
                    && source.stage == Stage::Asking
                {
                    source.stage = Stage::Expected;
                    if !is_answered {
                        self.actions.push_back(ConsumerAction::Answered { id: id.clone() });
                    }
                    self.look_again(id);
                }
            }
            None if self.tombstones.get(id).is_some() => self.decline(from, id),
            // A claim that failed. A fetch will ask again.
            None => {}
        }
    }

    /// Answers a producer that does not know that this rank does not need a handoff any more.
    fn decline(&mut self, to: PeerId, id: &HandoffId) {
        let code = self.tombstones.get(id).copied().unwrap_or(WireCode::UnknownHandoff);
        let code = if code.is_ok() { WireCode::Duplicate } else { code };
        let stop = Stop { id: id.clone(), by_consumer: true, code, detail: String::new() };
        self.actions.push_back(ConsumerAction::Send { to, message: stop.into() });
    }

    /// Counts memory of a producer's announcements. While all take too much, the handoff fails that has to give it up:
    /// this one, or one of a producer whose network has more. What has been read from its producer loses its side data
    /// instead: that producer may be done by now.
    fn hold(
        &mut self,
        id: &HandoffId,
        (from, origin): (PeerId, Origin),
        bytes: usize,
        now: Timestamp,
    ) {
        let announced = (id.clone(), from);
        self.announced.add(&announced, origin, from.0, bytes);
        while let Some(item) = self.announced.excess(&announced) {
            // Each turn makes room, so that there is a last one.
            self.announced.remove(&item);
            let (id, from) = item;
            let entry = self.handoffs.get_mut(&id);
            let Some(source) = entry.and_then(|entry| entry.sources.get_mut(&from)) else {
                continue;
            };
            if source.is_read() {
                source.announced.side_data = None;
                continue;
            }
            // Its memory is free when its reads have stopped, which no peer delays.
            self.release_all(&id);
            let detail = "the announcements of all handoffs take more memory than they may";
            self.fail(&id, Outcome::of(from, WireCode::Busy, detail), now);
        }
    }

    fn confirmed(&mut self, from: PeerId, id: &HandoffId, generation: Generation, now: Timestamp) {
        let Some(entry) = self.handoffs.get_mut(id) else { return };
        let Some(source) = entry.sources.get_mut(&from) else { return };
        if entry.ending.is_some()
            || source.stage != Stage::Confirming
            || source.generation != generation
        {
            return;
        }
        source.stage = Stage::Confirmed;
        let is_done = entry.sources.values().all(|source| source.stage == Stage::Confirmed);
        // This producer has confirmed, even if others have not.
        self.watch(from, false);
        let entry = self.handoffs.get_mut(id).expect("as before");
        if is_done {
            entry.ending = Some(Outcome::DONE);
            self.finish_if_quiet(id, now);
        } else {
            self.look_again(id);
        }
    }

    fn stopped(&mut self, from: PeerId, stop: Stop, now: Timestamp) {
        if self.farewells.answered(from, &stop.id) {
            return;
        }
        let Some(entry) = self.handoffs.get_mut(&stop.id) else { return };
        let Some(source) = entry.sources.get_mut(&from) else { return };
        if source.stage == Stage::Confirmed || entry.ending.is_some() {
            return;
        }
        let code = if stop.code.is_ok() { WireCode::Malformed } else { stop.code };
        self.fail(&stop.id, Outcome::of(from, code, stop.detail), now);
        self.farewells.answered(from, &stop.id);
    }
}
