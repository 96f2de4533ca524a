//! An engine with kvferry's block manager.

use super::{Engine, Workers};
use crate::config::EngineConfig;
use crate::offload::{EnginePages, Managed, Offload, OffloadError};
use crate::request::{Request, RequestId, SubmitError};
use crate::scheduler::{Scheduler, Seam};
use crate::worker::Ranks;
use kvferry_blocks::{Event, RetentionConfig, Usage, Warning};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Methods of engines made by [`Engine::with_offload`]. Other engines have no block manager.
impl Engine {
    /// An engine without a connector, whose blocks the block manager decides on.
    ///
    /// # Errors
    /// The settings contradict each other, or what the block manager can do; there is not enough memory.
    pub fn with_offload(config: EngineConfig, offload: Offload) -> Result<Self, OffloadError> {
        config.validate()?;
        let EnginePages { caches, pages } = EnginePages::allocate(&offload.agent, &config)?;
        let mut scheduler = Scheduler::new(&config, Seam::None);
        scheduler.managed = Some(Managed::start(&config, pages, offload)?);
        Ok(Self {
            ranks: Arc::new(Ranks::new(config.model.clone(), config.tp, caches)),
            config,
            scheduler,
            workers: Workers::None,
            scribbles: 0,
            violations: vec![],
            events: vec![],
            on_layer: None,
        })
    }

    /// Like [`Engine::submit`], with settings for the retention and offload of the request's
    /// blocks.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_with(
        &mut self,
        request: Request,
        retention: RetentionConfig,
    ) -> Result<(), SubmitError> {
        self.scheduler.submit(request, retention)
    }

    /// Wishes of requests that were replaced by others, since the last call.
    pub fn take_warnings(&mut self) -> Vec<(RequestId, Warning)> {
        let managed = self.scheduler.managed.as_mut();
        managed.map(|managed| std::mem::take(&mut managed.warnings)).unwrap_or_default()
    }

    /// The block manager's events since the last call.
    pub fn take_block_events(&mut self) -> Vec<Event> {
        let Some(managed) = &mut self.scheduler.managed else { return vec![] };
        std::iter::from_fn(|| managed.manager.poll_event()).collect()
    }

    /// Usage of a group's pools.
    pub fn block_usage(&self, group: u16) -> Option<Usage> {
        self.scheduler.managed.as_ref()?.manager.usage(group)
    }

    /// Counters of the copies.
    pub fn offload_stats(&self) -> kvferry_offload::Stats {
        self.scheduler.managed.as_ref().map(|it| it.driver.stats()).unwrap_or_default()
    }

    /// Copies that have not ended.
    pub fn copies_under_way(&self) -> usize {
        self.scheduler.managed.as_ref().map_or(0, |managed| managed.driver.under_way())
    }

    /// Blocks until a copy has ended; [`Engine::step`] never does. For a caller whose step had no tokens to compute. False:
    /// no copy is under way, or `timeout` has passed.
    pub fn wait_for_copy(&self, timeout: Duration) -> bool {
        self.scheduler.managed.as_ref().is_some_and(|managed| managed.driver.wait(timeout))
    }

    /// Blocks until all copies have ended. False: `timeout` has passed.
    pub fn finish_copies(&mut self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        loop {
            let taken = self.scheduler.take_ended_copies();
            if taken > 0 {
                continue;
            }
            if self.copies_under_way() == 0 && !self.wait_for_copy(Duration::ZERO) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.wait_for_copy(left);
        }
    }
}
