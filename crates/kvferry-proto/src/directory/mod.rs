//! Prompts on offer: which engines have computed which prompts, for engines that are given no parameters of a request.
//!
//! A router tells vLLM's decode engine which handoff a request takes part in. TensorRT-LLM gives a connector no
//! parameters, so a prompt is found by its content. An engine that prefills is a [`Publisher`]: it tells its followers
//! which handoff has which prompt. An engine that decodes is a [`Subscriber`]: it follows the publishers that its
//! operator names, and finds a prompt among what they have offered without a question over the network. The bytes then
//! move as a handoff ([`crate::handoff`]), which asks the publisher's ranks; nothing of it is restated here. [`Slots`]
//! are the staging memory of both.
//!
//! ```text
//! subscriber                                    publisher
//!   Follow              ──────────────>   room among its followers?
//!                       <──────────────   Followed: engine, address, lease, term
//!                       <──────────────   Offered: everything on offer, then each new prompt
//!                       <──────────────   Gone: an offer has ended
//!   Follow, a third of the lease later  ──────────────>
//!                       <──────────────   Followed: the same term
//! ```
//!
//! # Agreement
//!
//! A *term* is one uninterrupted time of following. Each begins with everything on offer, and a subscriber forgets what
//! it has heard in an earlier one. So messages that are lost with a session, and a restart of either end, are made up
//! for by the next term; and it makes no difference whether a prompt is offered before or after the subscriber follows.
//! An offer that has ended meanwhile costs a handoff that fails.
//!
//! # Who is believed
//!
//! A follower is a session, not an address that a peer names: no peer can have prompts told to another host. A
//! subscriber hears offers only over sessions that it has opened to addresses of its operator. What a publisher says of
//! its engine and its address is checked by the side that connects there, as the parameters of a request are.
//!
//! # Who is asked
//!
//! A fetch from a publisher that hangs costs the caller the whole time of a look-up. So each publisher is paused after
//! such a fetch ([`Limits::pause`]), and there is one pause for all publishers that are not *proven*. A publisher is
//! proven by a fetch that works, until one hangs. A proven publisher that hangs takes this from all, because the cause
//! may be theirs, too; each is proven anew by its next fetch. However many publishers hang, a caller then loses as much
//! time as to one of them; and publishers that hang don't delay fetches from proven ones.
//!
//! # Bounds
//!
//! Everything that is kept has a cap and an end in time: [`Limits`]. Followers share their room by network, host and
//! peer, and publishers share the room for what is heard from them ([`crate::Shares`]).
//!
//! # How a driver runs it
//!
//! The methods of both machines fall into the classes of [`crate::session`].
//!
//! * **What happened** goes in: [`Publisher::publish`], [`Publisher::retract`], [`Publisher::receive`],
//!   [`Publisher::lost`]; [`Subscriber::opened`], [`Subscriber::lost`], [`Subscriber::receive`],
//!   [`Subscriber::failed`], [`Subscriber::worked`].
//! * **What to do** comes out of [`Publisher::poll`] and [`Subscriber::poll`], one action at a time.
//! * **Time**: [`Publisher::expire`] and [`Subscriber::expire`] are due at their `next_timeout`.
//! * **Queries** change nothing: `gauges`, [`Publisher::followers`]. [`Subscriber::take`] also takes what it finds.
//!
//! After each call that is not a query the driver polls until there is no action left, and carries the actions out in
//! order.

mod heard;
mod message;
mod publisher;
mod slots;
mod subscriber;

pub use message::{
    ContentKey, DirectoryMessage, Follow, Followed, Gone, NotFollowed, OFFERS_MAX, Offer, Offered,
};
pub use publisher::{Publisher, PublisherAction};
pub use slots::Slots;
pub use subscriber::{Found, Place, Subscriber, SubscriberAction};

use std::time::Duration;

/// Bounds on what a side keeps, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Followers of a publisher, which their networks, hosts and peers share.
    pub followers: usize,
    /// Prompts that a publisher has on offer.
    pub offers: usize,
    /// Offers that a subscriber remembers, which publishers share.
    pub heard: usize,
    /// Offers of one prompt that a subscriber remembers. The oldest is forgotten first.
    pub heard_of_prompt: usize,
    /// Time for which a subscriber remembers an offer at most, and for which a publisher keeps one.
    pub offer_ttl: Duration,
    /// Time after which a publisher forgets a follower that has not said again that it follows.
    pub lease: Duration,
    /// Time that a subscriber waits for the answer to [`Follow`].
    pub answer: Duration,
    /// Wait before a subscriber connects again: after the first session that ended, and the longest one. Each attempt
    /// that fails doubles it.
    pub retry: (Duration, Duration),
    /// Time for which a publisher is not asked after a fetch without a result that had half of the time of a look-up:
    /// after the first, and the longest. Each such fetch doubles it. Publishers that are not proven have such a pause
    /// together, too, so that a caller loses no more time to many of them than to one.
    pub pause: (Duration, Duration),
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            followers: 256,
            offers: 16 * 1024,
            heard: 64 * 1024,
            heard_of_prompt: 256,
            offer_ttl: Duration::from_secs(60),
            lease: Duration::from_secs(20),
            answer: Duration::from_secs(5),
            retry: (Duration::from_millis(250), Duration::from_secs(5)),
            pause: (Duration::from_secs(2), Duration::from_secs(60)),
        }
    }
}

/// A wait that doubles with each failure, from `first` up to `longest`.
#[derive(Clone, Copy, Debug, Default)]
struct Backoff(Duration);

impl Backoff {
    fn next(&mut self, (first, longest): (Duration, Duration)) -> Duration {
        self.0 = (2 * self.0).clamp(first, longest.max(first));
        self.0
    }
}
