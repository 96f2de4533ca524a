//! Distribution of a request's tokens over context-parallel ranks.

use super::{ContextShard, Group};

/// A [`ContextShard`] with the length of its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    /// Below `size`.
    pub(crate) rank: u32,
    /// Ranks that share the tokens.
    pub(crate) size: u32,
    /// Tokens of a run.
    pub(crate) run: u32,
}

impl Context {
    pub(crate) const fn of(group: &Group) -> Self {
        let ContextShard { rank, size, .. } = group.context;
        Self { rank, size, run: group.context.run(group.block_tokens) }
    }

    /// A context with all tokens on one rank, in blocks of `block_tokens`.
    pub(crate) const fn whole(block_tokens: u32) -> Self {
        Self { rank: 0, size: 1, run: block_tokens }
    }

    /// Whether some token is on both ranks.
    pub(crate) fn meets(self, other: Self) -> bool {
        // Runs of both recur with their periods, so they meet wherever their remainders modulo the
        // periods' common divisor do: two arcs on a circle.
        let (ours, theirs) = (u64::from(self.run), u64::from(other.run));
        let circle = gcd(ours * u64::from(self.size), theirs * u64::from(other.size));
        let a = ours * u64::from(self.rank) % circle;
        let b = theirs * u64::from(other.rank) % circle;
        (b + circle - a) % circle < ours || (a + circle - b) % circle < theirs
    }

    /// Number of the first `tokens` tokens that this rank holds.
    pub(crate) const fn local(self, tokens: u64) -> u64 {
        let run = self.run as u64;
        let period = run * self.size as u64;
        let rest = (tokens % period).saturating_sub(self.rank as u64 * run);
        tokens / period * run + if rest < run { rest } else { run }
    }

    /// Whether this rank holds the token.
    pub(crate) const fn holds(self, token: u64) -> bool {
        token / self.run as u64 % self.size as u64 == self.rank as u64
    }

    /// The token of the request that is the `local`-th of this rank.
    pub(crate) const fn global(self, local: u64) -> u64 {
        let run = self.run as u64;
        (local / run * self.size as u64 + self.rank as u64) * run + local % run
    }
}

const fn gcd(a: u64, b: u64) -> u64 {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Context> {
        let sizes = [(1, 1), (1, 4), (2, 4), (3, 1), (3, 6), (4, 16)];
        sizes
            .into_iter()
            .flat_map(|(size, run)| (0..size).map(move |rank| Context { rank, size, run }))
    }

    #[test]
    fn runs_meet_exactly_if_a_token_is_in_both() {
        for a in all() {
            for b in all() {
                let met = (0..4096).any(|token| a.holds(token) && b.holds(token));
                assert_eq!(a.meets(b), met, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn local_numbers_count_the_tokens_that_are_here() {
        for it in all() {
            let mut here = 0;
            for token in 0..300 {
                assert_eq!(it.local(token), here, "{it:?} {token}");
                if it.holds(token) {
                    assert_eq!(it.global(here), token);
                    here += 1;
                }
            }
        }
    }
}
