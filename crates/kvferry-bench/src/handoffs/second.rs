//! A second handoff between two engines of one host, over `local` beside TCP. Both have opened their
//! sessions and touched their pages; every block is ready beforehand.

use crate::failure::Failure;
use crate::stats::Spread;
use crate::units;

use super::Settings;
use super::exposed::{Pair, geometry};
use super::rank::Ready;
use crate::report::{Bound, Figure, Row};

/// Rate over `local`, of the rate over TCP.
const LEAST: Bound = Bound::AtLeast(1.0);

pub(super) fn run(settings: &mut Settings) -> Result<Vec<Row>, Failure> {
    let both = ["local", "tcp"];
    if !both.iter().all(|it| settings.options.transports.iter().any(|asked| asked == it)) {
        settings.remarks.push("a second handoff is measured over local and tcp only".into());
        return Ok(Vec::new());
    }
    let geometry = geometry(settings, 2);
    let start = |transport| Pair::start(transport, Ready::Chunks, geometry);
    let mut pairs = [start("local")?, start("tcp")?];
    for pair in &mut pairs {
        pair.ready_beforehand()?;
    }
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..settings.rounds {
        settings.bar.set_message(format!("second handoff, round {}", round + 1));
        for turn in 0..2 {
            let at = (round + turn) % 2;
            times[at].push(pairs[at].ready_beforehand()?.as_secs_f64() * 1e3);
        }
    }
    let bytes = units::bytes(super::exposed::handoff_bytes(&geometry));
    let [local, tcp] = times;
    let rate = Spread::ratio(&tcp, &local);
    let figures = [("local", local), ("tcp", tcp)].map(|(who, ms)| Figure::of(who, Spread::of(ms)));
    let mut row = Row::with("second", bytes.as_str(), "ms", figures.into());
    row.judge(format!("{bytes}, rate over local"), "that over tcp", Some(rate), LEAST);
    Ok(vec![row])
}
