//! `kvferry doctor HOST:PORT`: an agent as it is seen from here.
//!
//! The agent sends what it sends every peer: its name, its regions, answers to probes. Its memory is
//! never written. Reads are measured on memory that peers may read, at most [`READ_MAX`] at a time and
//! for [`READ_FOR`]; writes only at a `kvferry bench transfers --serve`, which has memory for them.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry::{
    Access, Agent, Batch, Config, Error, ErrorKind, Options, Peer, PeerSummary, RemoteRegion,
    Transports,
};
use serde_json::json;

use super::DoctorArgs;
use super::finding::{Finding, Group, Mark, Report};
use kvferry_bench::failure::Failure;
use kvferry_bench::stats::{median, quantile_of};
use kvferry_bench::transfers::reach::{self, Answered};
use kvferry_bench::units;

/// Most of a peer's memory that is read at a time.
const READ_MAX: usize = 64 << 20;
/// Time in which reads are measured; at least [`READS_LEAST`] of them.
const READ_FOR: Duration = Duration::from_secs(1);
const READS_LEAST: usize = 3;
/// Blocks of a read.
const BLOCK: usize = 256 << 10;

/// Round trips, and those before that are not counted.
const PINGS: usize = 200;
const WARM: usize = 20;
const PING_FOR: Duration = Duration::from_secs(2);

/// Time without an answer after which a peer is tried as a bench.
const QUIET: Duration = Duration::from_millis(700);

/// Makes all findings about one peer.
pub(super) fn look(target: &str, args: &DoctorArgs) -> Result<Report, Failure> {
    let timeout = Duration::from_secs(args.timeout.into());
    let mut network = Vec::new();
    let reached = reach(target, timeout, &mut network)?;
    let mut groups =
        vec![Group { name: "reach", title: "The way there".into(), findings: network }];
    if let Some(address) = reached {
        let findings = agent(target, address, timeout, !args.no_bandwidth);
        groups.push(Group { name: "peer", title: "The agent there".into(), findings });
    }
    Ok(Report::new(Some(target.to_owned()), groups))
}

/// Name, route, connection. The first address that takes one.
fn reach(
    target: &str,
    timeout: Duration,
    findings: &mut Vec<Finding>,
) -> Result<Option<SocketAddr>, Failure> {
    let began = Instant::now();
    let addresses: Vec<SocketAddr> = match target.to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(Failure::Usage(format!("`{target}` is not HOST:PORT: {error}")));
        }
        Err(error) => {
            findings.push(
                Finding::bad("name", format!("the name has no address: {error}"))
                    .fix("the spelling, DNS, /etc/hosts; or give an address"),
            );
            return Ok(None);
        }
    };
    let listed: Vec<String> = addresses.iter().map(|a| a.ip().to_string()).collect();
    let mut words = listed.join(", ");
    if target.parse::<SocketAddr>().is_err() {
        words.push_str(&format!(", looked up in {}", units::duration(began.elapsed())));
    }
    findings.push(Finding::ok("name", words).fact("addresses", json!(listed)));
    let mut refusals = Vec::new();
    for address in addresses {
        let began = Instant::now();
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                let took = began.elapsed();
                findings.push(route(address, stream.local_addr().ok()));
                let words = format!("{address} takes connections, in {}", units::duration(took));
                let finding = Finding::ok("connect", words).fact("connect_us", micros(took));
                findings.push(finding);
                return Ok(Some(address));
            }
            Err(error) => refusals.push((address, error)),
        }
    }
    findings.extend(refusals.iter().map(|(address, error)| refused(*address, error)));
    Ok(None)
}

fn micros(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e7).round() / 10.0
}

fn same_host(source: IpAddr, address: SocketAddr) -> bool {
    address.ip().is_loopback() || source == address.ip()
}

fn route(address: SocketAddr, from: Option<SocketAddr>) -> Finding {
    let Some(source) = from.map(|from| from.ip()) else {
        return Finding::ok("route", "the kernel does not tell");
    };
    let same = same_host(source, address);
    let words = if same { "this host".to_owned() } else { format!("another host, from {source}") };
    Finding::ok("route", words).fact("same_host", same).fact("source", source.to_string())
}

fn refused(address: SocketAddr, error: &io::Error) -> Finding {
    use io::ErrorKind as Kind;
    let (why, fix) = match error.kind() {
        Kind::ConnectionRefused => (
            "no process listens on the port".to_owned(),
            "start the agent, or the right port: the one it advertises; \
             on a loopback listener set KVFERRY_LISTEN=0.0.0.0:PORT there",
        ),
        Kind::TimedOut => (
            "no answer at all".to_owned(),
            "a firewall or a security group that drops the port; is the host up?",
        ),
        Kind::HostUnreachable | Kind::NetworkUnreachable => {
            ("no route there".to_owned(), "ip route get ADDRESS; is the interface up?")
        }
        _ => (error.to_string(), "look at the route and the firewall between the hosts"),
    };
    Finding::bad("connect", format!("{address}: {why}")).fix(fix)
}

/// The session and what it can do.
fn agent(target: &str, address: SocketAddr, timeout: Duration, bandwidth: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let ours = match start(None) {
        Ok(ours) => ours,
        Err(error) => {
            return vec![
                Finding::bad("settings", format!("no agent can be started here: {error}"))
                    .fix("see kvferry doctor without arguments"),
            ];
        }
    };
    let (peer, summary, serves) = match meet(&ours, target, address, timeout) {
        Meeting::Agent { peer, summary, serves } => (peer, summary, serves),
        Meeting::NoAgent(finding) => return vec![finding],
    };
    findings.push(handshake(&ours, &summary, serves));
    findings.push(transports(&ours, &summary, peer.address(), address, timeout));
    findings.push(checksums(&summary, &ours));
    let regions = peer.regions(timeout);
    findings.push(regions_shown(&regions));
    findings.push(round_trip(&peer, timeout));
    if bandwidth {
        findings.extend(if serves {
            served_bandwidth(&ours, target)
        } else {
            vec![read_bandwidth(&ours, &peer, &regions.unwrap_or_default(), timeout)]
        });
    }
    findings
}

/// An agent of this environment's settings, on loopback: it only calls.
fn start(transports: Option<Transports>) -> Result<Agent, Error> {
    let config = Config::from_env()?;
    let secret = config.secret.is_some();
    let mut builder = Agent::builder().name("kvferry-doctor").listen(([127, 0, 0, 1], 0));
    if let Some(transports) = transports {
        builder = builder.transports(transports);
    }
    // As an engine's drop-in: it also connects to stock Mooncake peers, unless a secret is set.
    builder.setting("mooncake", !secret).start()
}

enum Meeting {
    Agent {
        peer: Peer,
        summary: PeerSummary,
        /// The address is of a `bench --serve`.
        serves: bool,
    },
    NoAgent(Finding),
}

fn meet(ours: &Agent, target: &str, address: SocketAddr, timeout: Duration) -> Meeting {
    let (tell, told) = mpsc::channel();
    {
        // The address that took a connection; others of the same name may be dead.
        let (ours, at) = (ours.clone(), address.to_string());
        std::thread::spawn(move || {
            // The receiver waits, unless the peer turned out to be a bench.
            let _ = tell.send(connect(&ours, &at, timeout));
        });
    }
    let early = told.recv_timeout(QUIET).ok();
    let greeting = match early {
        Some(_) => Answered::Nothing,
        None => reach::identify(address, QUIET),
    };
    let error = match greeting {
        Answered::Bench(agent) => return served(connect(ours, &agent, timeout), target),
        Answered::Other(what) => return Meeting::NoAgent(other_protocol(what)),
        Answered::Nothing => {
            let late = || told.recv().expect("the connecting thread sends its result");
            match early.unwrap_or_else(late) {
                Ok((peer, summary)) => return Meeting::Agent { peer, summary, serves: false },
                Err(error) => error,
            }
        }
    };
    let unknown = [
        ErrorKind::PeerReset,
        ErrorKind::PeerClosed,
        ErrorKind::PeerSilent,
        ErrorKind::Protocol,
        ErrorKind::Deadline,
    ];
    if !unknown.contains(&error.kind()) {
        return Meeting::NoAgent(turned_away(&error));
    }
    match reach::identify(address, QUIET) {
        Answered::Bench(agent) => served(connect(ours, &agent, timeout), target),
        Answered::Other(what) => Meeting::NoAgent(other_protocol(what)),
        Answered::Nothing => Meeting::NoAgent(silent(&error)),
    }
}

fn connect(ours: &Agent, at: &str, timeout: Duration) -> Result<(Peer, PeerSummary), Error> {
    let peer = ours.peer(at)?;
    let summary = peer.connect(timeout)?;
    Ok((peer, summary))
}

fn served(met: Result<(Peer, PeerSummary), Error>, target: &str) -> Meeting {
    match met {
        Ok((peer, summary)) => Meeting::Agent { peer, summary, serves: true },
        Err(error) => {
            let mut finding = turned_away(&error);
            finding.finding =
                format!("{target} is a bench --serve; its agent: {}", finding.finding);
            Meeting::NoAgent(finding)
        }
    }
}

/// Explains why there is no session, and what to do.
fn turned_away(error: &Error) -> Finding {
    let (why, fix) = match error.kind() {
        ErrorKind::AuthRequired => (
            "it has a secret, and none is set here".to_owned(),
            "KVFERRY_SECRET_FILE here, with the content of the file there",
        ),
        ErrorKind::AuthUnsupported => (
            "a secret is set here, and it has none".to_owned(),
            "KVFERRY_SECRET_FILE there, with the content of the file here",
        ),
        ErrorKind::AuthFailed => (
            "both have a secret, and they differ".to_owned(),
            "the same KVFERRY_SECRET_FILE content on both hosts",
        ),
        ErrorKind::VersionMismatch => {
            (error.to_string(), "kvferry of one release on both hosts, or of neighbouring ones")
        }
        ErrorKind::Unsupported => {
            (error.to_string(), "KVFERRY_TRANSPORTS with a transport of both")
        }
        ErrorKind::Unreachable => (error.to_string(), "see the way there"),
        _ => (error.to_string(), "look at the agent's log (KVFERRY_LOG=info)"),
    };
    Finding::bad("handshake", why).fix(fix).fact("error", error.kind().as_str())
}

const PORT: &str =
    "the right port: the one that the agent advertises; see its log (KVFERRY_LOG=info)";

fn other_protocol(said: &str) -> Finding {
    let words = format!("no kvferry agent and no Mooncake peer: {said}");
    Finding::bad("handshake", words).fix(PORT).fact("error", "protocol").fact("said", said)
}

/// The peer took the connection and sent nothing.
fn silent(error: &Error) -> Finding {
    let words = match error.kind() {
        ErrorKind::PeerSilent | ErrorKind::Deadline => {
            "it sends nothing: another program, or an agent whose process is stopped"
        }
        _ => "it closes the connection: another program, or an agent that is shutting down",
    };
    Finding::bad("handshake", words).fix(PORT).fact("error", error.kind().as_str())
}

fn handshake(ours: &Agent, summary: &PeerSummary, serves: bool) -> Finding {
    if summary.transport == kvferry_mooncake::KIND {
        return Finding::note(
            "handshake",
            "a stock Mooncake peer: no secret, no name, no heartbeat",
        )
        .fix("use kvferry's drop-in there if a cancel must be confirmed: KVFERRY_SHIMS=mooncake")
        .fact("kind", "mooncake");
    }
    let kind = if serves { "a kvferry bench transfers --serve" } else { "a kvferry agent" };
    let words = format!("{kind} named {}, protocol version {}", summary.name, summary.version);
    let finding = if summary.authenticated {
        Finding::ok("handshake", format!("{words}; both proved the secret"))
    } else if ours.config().secret.is_none() {
        Finding::ok("handshake", format!("{words}; neither has a secret"))
    } else {
        Finding::bad("handshake", format!("{words}; the secret was not proved"))
            .fix("kvferry of one release on both hosts")
    };
    finding
        .fact("kind", if serves { "bench" } else { "kvferry" })
        .fact("name", summary.name.as_str())
        .fact("protocol", summary.version)
        .fact("authenticated", summary.authenticated)
}

/// Transports that both ends have, which one is used, and why.
fn transports(
    ours: &Agent,
    summary: &PeerSummary,
    at: &str,
    address: SocketAddr,
    timeout: Duration,
) -> Finding {
    let chosen = summary.transport.as_str();
    let mut both = vec![chosen];
    if chosen != "tcp" && summary.transport != kvferry_mooncake::KIND {
        both.push("tcp");
    }
    if summary.transport != kvferry_mooncake::KIND
        && ours.transports().contains(kvferry_mooncake::KIND)
        && ours.config().secret.is_none()
        && speaks_mooncake(at, timeout)
    {
        both.push("mooncake");
    }
    let source = kvferry_sys::net::source_towards(address);
    let same = source.is_ok_and(|source| same_host(source, address));
    let (mark, why) = match (chosen, same, &summary.fallback) {
        ("mooncake", ..) => (Mark::Ok, "it is all that a stock peer speaks"),
        ("local", ..) => (Mark::Ok, "one process can reach the other's memory"),
        (_, true, Some(reason)) => (Mark::Note, reason.as_str()),
        _ => (Mark::Ok, "this build has nothing faster between hosts"),
    };
    let words = format!("{chosen} is used: {why}; both have {}", both.join(", "));
    let finding = match mark {
        Mark::Note => Finding::note("transports", words)
            .fix("see `same host` in kvferry doctor, here and in the container of the other"),
        _ => Finding::ok("transports", words),
    };
    finding.fact("chosen", chosen).fact("both", json!(both))
}

/// Whether the peer answers the handshake of a stock Mooncake peer.
fn speaks_mooncake(at: &str, timeout: Duration) -> bool {
    let only = start(Some(Transports::only(kvferry_mooncake::KIND)));
    only.and_then(|only| only.peer(at)?.connect(timeout)).is_ok()
}

fn checksums(summary: &PeerSummary, ours: &Agent) -> Finding {
    let words = if summary.checksum {
        "on: every 256 KiB of payload is checked"
    } else if summary.transport == kvferry_mooncake::KIND {
        "off: Mooncake's protocol has none"
    } else if format!("{:?}", ours.config().checksum) == "Auto" {
        "off, as within one host by default"
    } else {
        "off, as configured"
    };
    Finding::ok("checksums", words).fact("on", summary.checksum)
}

fn regions_shown(regions: &Result<Vec<RemoteRegion>, Error>) -> Finding {
    let regions = match regions {
        Ok(regions) => regions,
        Err(error) => {
            return Finding::bad("regions", format!("it does not list its memory: {error}"))
                .fix("look at the agent's log (KVFERRY_LOG=info)");
        }
    };
    let total = |wanted: fn(&Access) -> bool| -> u64 {
        regions.iter().filter(|region| wanted(&region.access)).map(|region| region.len).sum()
    };
    let (readable, writable) = (total(|access| access.read), total(|access| access.write));
    let words = match regions.len() {
        0 => "none: nothing is registered there for peers yet".to_owned(),
        count => format!(
            "{count}: {} to be read, {} to be written",
            units::bytes(readable),
            units::bytes(writable)
        ),
    };
    Finding::ok("regions", words)
        .fact("count", regions.len())
        .fact("readable", readable)
        .fact("writable", writable)
}

fn round_trip(peer: &Peer, timeout: Duration) -> Finding {
    let began = Instant::now();
    let mut taken = Vec::with_capacity(PINGS);
    for ping in 0..WARM + PINGS {
        match peer.probe(timeout) {
            Ok(time) if ping >= WARM => taken.push(micros(time)),
            Ok(_) => {}
            Err(error) => {
                return Finding::bad("round_trip", format!("no answer: {error}"))
                    .fix("look at the agent's log (KVFERRY_LOG=info)");
            }
        }
        if began.elapsed() > PING_FOR && taken.len() >= WARM {
            break;
        }
    }
    let (half, slow) = (quantile_of(&mut taken, 0.5), quantile_of(&mut taken, 0.99));
    let shown = |us: f64| units::duration(Duration::from_secs_f64(us / 1e6));
    let count = taken.len();
    let words =
        format!("p50 {}, p99 {} of {count} to its control thread", shown(half), shown(slow));
    Finding::ok("round_trip", words).fact("p50_us", half).fact("p99_us", slow).fact("count", count)
}

fn rate(gb_per_s: f64) -> String {
    format!("{} GB/s ({} Gbit/s)", units::figure(gb_per_s), units::figure(gb_per_s * 8.0))
}

const SERVE: &str =
    "kvferry bench transfers --serve --listen ADDRESS:PORT there, and doctor with that address";

/// Reads memory that peers may read. Writes nothing.
fn read_bandwidth(
    ours: &Agent,
    peer: &Peer,
    regions: &[RemoteRegion],
    timeout: Duration,
) -> Finding {
    let Some(region) =
        regions.iter().filter(|region| region.access.read).max_by_key(|region| region.len)
    else {
        return Finding::note(
            "bandwidth",
            "not measured: the agent has no memory that peers may read",
        )
        .fix(SERVE);
    };
    let len = usize::try_from(region.len).unwrap_or(usize::MAX).min(READ_MAX);
    match reads(ours, peer, region, len, timeout) {
        Ok(rates) => {
            let figure = median(&rates);
            let words = format!(
                "reads {}, {} at a time; writes are not measured, its memory is in use",
                rate(figure),
                units::bytes(len as u64)
            );
            Finding::ok("bandwidth", words)
                .fact("read_gb_per_s", figure)
                .fact("bytes", len)
                .fact("rounds", rates.len())
        }
        Err(error) => Finding::bad("bandwidth", format!("a read failed: {error}"))
            .fix("look at the agent's log (KVFERRY_LOG=info)"),
    }
}

fn reads(
    ours: &Agent,
    peer: &Peer,
    region: &RemoteRegion,
    len: usize,
    timeout: Duration,
) -> Result<Vec<f64>, Error> {
    let into = ours.allocate(len, Access::NONE)?;
    let mut batch = Batch::new();
    for at in (0..len).step_by(BLOCK) {
        let block = BLOCK.min(len - at) as u64;
        batch.push(&into, at as u64, region, at as u64, block)?;
    }
    let options = Options { timeout: Some(timeout), ..Options::default() };
    // The first one opens streams and touches pages.
    peer.read(&batch, &options)?;
    let (mut rates, began) = (Vec::new(), Instant::now());
    while rates.len() < READS_LEAST || began.elapsed() < READ_FOR {
        let began = Instant::now();
        peer.read(&batch, &options)?;
        rates.push(len as f64 / began.elapsed().as_secs_f64() / 1e9);
    }
    Ok(rates)
}

/// Writes and reads memory that a `bench --serve` offers for it.
fn served_bandwidth(ours: &Agent, target: &str) -> Vec<Finding> {
    match reach::measure(ours, target, READ_MAX, BLOCK, READ_FOR) {
        Ok(measured) => {
            let words = format!("writes {}, reads {}", rate(measured.write), rate(measured.read));
            vec![
                Finding::ok(
                    "bandwidth",
                    format!("{words}, {} at a time", units::bytes(READ_MAX as u64)),
                )
                .fact("write_gb_per_s", measured.write)
                .fact("read_gb_per_s", measured.read)
                .fact("bytes", READ_MAX),
            ]
        }
        Err(why) => vec![
            Finding::note("bandwidth", format!("not measured: {why}"))
                .fix("one bench at a time runs on a target: try again when it has ended"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connection_says_which_kind_and_what_to_do() {
        let address: SocketAddr = "10.0.0.7:1".parse().expect("an address");
        for kind in [
            io::ErrorKind::ConnectionRefused,
            io::ErrorKind::TimedOut,
            io::ErrorKind::HostUnreachable,
            io::ErrorKind::Other,
        ] {
            let finding = refused(address, &kind.into());
            assert!(finding.mark == Mark::Bad && finding.fix.is_some(), "{finding:?}");
        }
        assert!(same_host(address.ip(), address));
        assert!(!same_host([10, 0, 0, 8].into(), address));
    }
}
