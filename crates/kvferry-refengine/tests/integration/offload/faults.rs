//! Holds copies back, and has them fail.

use kvferry_blocks::{Tier, Transfer};
use kvferry_offload::{Fault, Intercept, Options};
use std::sync::{Arc, Condvar, Mutex};

#[derive(Debug, Default)]
struct State {
    is_shut: bool,
    arrived: usize,
}

/// Copies wait before it while it is shut.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<State>, Condvar)>);

impl Gate {
    pub(crate) fn shut(&self) {
        let mut state = self.0.0.lock().unwrap();
        (state.is_shut, state.arrived) = (true, 0);
    }

    pub(crate) fn open(&self) {
        self.0.0.lock().unwrap().is_shut = false;
        self.0.1.notify_all();
    }

    /// Opens it when the value is dropped: a driver that ends waits for its threads.
    pub(crate) fn opens_at_end(&self) -> impl Drop + use<> {
        struct Opens(Gate);
        impl Drop for Opens {
            fn drop(&mut self) {
                self.0.open();
            }
        }
        Opens(self.clone())
    }

    /// Returns when a copy waits.
    pub(crate) fn wait_for_copy(&self) {
        let state = self.0.0.lock().unwrap();
        let (_open, late) = self
            .0
            .1
            .wait_timeout_while(state, crate::offload::kit::LONG, |state| state.arrived == 0)
            .unwrap();
        assert!(!late.timed_out(), "no copy came");
    }

    fn pass(&self) {
        let mut state = self.0.0.lock().unwrap();
        state.arrived += usize::from(state.is_shut);
        self.0.1.notify_all();
        let _open = self.0.1.wait_while(state, |state| state.is_shut).unwrap();
    }
}

/// Copies that `which` names wait before the gate.
pub(crate) fn held_at(
    gate: &Gate,
    options: Options,
    which: impl Fn(&Transfer) -> bool + Send + Sync + 'static,
) -> Options {
    let gate = gate.clone();
    options.intercept(Intercept::new(move |transfer| {
        if which(transfer) {
            gate.pass();
        }
        Fault::None
    }))
}

/// Copies that `which` names fail.
pub(crate) fn failing(
    options: Options,
    which: impl Fn(&Transfer) -> bool + Send + Sync + 'static,
) -> Options {
    options.intercept(Intercept::new(move |transfer| match which(transfer) {
        true => Fault::Fail,
        false => Fault::None,
    }))
}

pub(crate) fn is_offload(transfer: &Transfer) -> bool {
    transfer.to.tier == Tier::Secondary
}

pub(crate) fn is_onboard(transfer: &Transfer) -> bool {
    transfer.from.tier == Tier::Secondary
}
