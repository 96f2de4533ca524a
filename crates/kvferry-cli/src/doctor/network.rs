//! The address that an agent would have, interfaces, and the kernel's TCP settings.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use kvferry::{AdvertisedBy, Config, TransportSetting, TransportSettings};
use kvferry_sys::net::InterfaceAddress;
use serde_json::json;

use super::finding::{Finding, Group};
use super::host::{Host, Tries};
use kvferry_bench::units;

/// Bytes in flight of one connection at 100 Gbit/s and 1 ms.
const WINDOW: u64 = 12 << 20;
/// The backlog that an agent asks for.
const BACKLOG: u64 = 4096;
const PORTS: u64 = 10_000;
/// Link speed from which ordinary frames cost more than the network.
const FAST_MBIT: u64 = 25_000;
const JUMBO: u64 = 9_000;

/// Settings that an agent on this host would have.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) addresses: Result<(SocketAddr, String, AdvertisedBy), String>,
    /// The same, if it listened on every interface.
    pub(super) everywhere: Result<(SocketAddr, String, AdvertisedBy), String>,
    pub(super) transports: Result<String, String>,
    pub(super) secret: bool,
    /// Settings of transports that do not have their default, with their values.
    pub(super) of_transports: Vec<(&'static TransportSetting, &'static str)>,
}

impl Settings {
    pub(super) fn of(config: Result<Config, String>) -> Settings {
        let checked = config.and_then(|config| match config.check() {
            Ok(()) => Ok(config),
            Err(error) => Err(error.to_string()),
        });
        let addresses = |config: &Config| config.addresses().map_err(|error| error.to_string());
        let refused = || checked.clone().err().unwrap_or_default();
        Settings {
            addresses: checked.as_ref().map_err(|_| refused()).and_then(addresses),
            everywhere: checked.as_ref().map_err(|_| refused()).and_then(|config| {
                let mut everywhere = config.clone();
                everywhere.listen = Some("0.0.0.0:0".into());
                addresses(&everywhere)
            }),
            transports: checked
                .as_ref()
                .map(|config| config.transports.to_string())
                .map_err(|_| refused()),
            secret: checked.as_ref().is_ok_and(|config| config.secret.is_some()),
            of_transports: checked.as_ref().map(set_of_transports).unwrap_or_default(),
        }
    }
}

fn set_of_transports(config: &Config) -> Vec<(&'static TransportSetting, &'static str)> {
    let values = TransportSettings::all()
        .filter_map(|setting| Some((setting, config.transport_settings.get(setting.name())?)));
    values.filter(|(setting, value)| *value != setting.default_value()).collect()
}

pub(super) fn check(host: &Host, tries: &Tries, settings: &Settings) -> Group {
    let mut findings = agent(settings, &tries.addresses);
    findings.extend(interfaces(host, &tries.addresses));
    findings.extend([congestion(host), buffers(host), backlog(host)].into_iter().flatten());
    findings.extend([abort(host), slow_start(host), ports(host)].into_iter().flatten());
    Group { name: "network", title: "Network".into(), findings }
}

fn rule(by: AdvertisedBy) -> String {
    match by {
        AdvertisedBy::Option => "as configured".to_owned(),
        AdvertisedBy::Variable(name) => format!("from {name}"),
        AdvertisedBy::DefaultRoute => "the default route's".to_owned(),
        _ => "the one it listens on".to_owned(),
    }
}

/// `host:port` without the port, which the kernel chooses.
fn host_of(address: &str) -> &str {
    address.strip_suffix(":0").unwrap_or(address)
}

fn port_of(address: SocketAddr) -> String {
    match address.port() {
        0 => "a port of the kernel's choice".to_owned(),
        port => format!("port {port}"),
    }
}

fn agent(settings: &Settings, own: &[InterfaceAddress]) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &settings.addresses {
        Err(why) => findings.push(
            Finding::bad("agent", format!("no agent would start: {why}"))
                .fix("correct the KVFERRY_ variable that is named"),
        ),
        Ok((listen, told, by)) => {
            findings.push(listening(*listen, own));
            findings.push(advertised(*listen, told, *by, own));
            if listen.ip().is_loopback()
                && let Ok((_, told, by)) = &settings.everywhere
            {
                let words = format!("{}, {}", host_of(told), rule(*by));
                findings.push(Finding::ok("beyond", words).of("with 0.0.0.0"));
            }
            let open = !listen.ip().is_loopback() && !settings.secret;
            findings.push(secret(settings.secret, open));
        }
    }
    findings.push(match &settings.transports {
        Ok(names) => Finding::ok("transports", names.replace(',', ", ")),
        Err(why) => Finding::bad("transports", why.as_str()).fix("correct KVFERRY_TRANSPORTS"),
    });
    findings.extend(settings.of_transports.iter().map(|(setting, value)| {
        let words = format!("{value}: {}", setting.about());
        Finding::ok("setting", words).of(setting.name()).fact("value", *value)
    }));
    findings
}

fn is_here(ip: IpAddr, own: &[InterfaceAddress]) -> bool {
    ip.is_loopback() || own.iter().any(|known| known.address == ip)
}

fn listening(listen: SocketAddr, own: &[InterfaceAddress]) -> Finding {
    let ip = listen.ip();
    let finding = if ip.is_loopback() {
        let words = format!("{ip}, {}: only processes of this host can call", port_of(listen));
        Finding::note("listen", words).fix("KVFERRY_LISTEN=0.0.0.0:0 for peers on other hosts")
    } else if ip.is_unspecified() {
        Finding::ok("listen", format!("every interface, {}", port_of(listen)))
    } else if is_here(ip, own) {
        Finding::ok("listen", format!("{ip}, {}", port_of(listen)))
    } else {
        Finding::bad("listen", format!("{ip} is no address of this host"))
            .fix("KVFERRY_LISTEN with an address that is listed below, or 0.0.0.0:0")
    };
    finding.fact("address", listen.to_string())
}

fn advertised(
    listen: SocketAddr,
    told: &str,
    by: AdvertisedBy,
    own: &[InterfaceAddress],
) -> Finding {
    let words = format!("{}, {}", host_of(told), rule(by));
    let ip = told.parse::<SocketAddr>().map(|told| told.ip()).ok();
    let finding = match ip {
        Some(ip) if ip.is_loopback() && !listen.ip().is_loopback() => {
            Finding::bad("advertise", format!("{words}: no other host can call it"))
                .fix("KVFERRY_ADVERTISE with an address that peers reach")
        }
        Some(ip) if !is_here(ip, own) => {
            Finding::note("advertise", format!("{words}; no interface here has it"))
                .fix("right behind address translation only; else KVFERRY_ADVERTISE")
        }
        _ => Finding::ok("advertise", words),
    };
    finding.fact("address", told)
}

fn secret(set: bool, open: bool) -> Finding {
    let finding = match (set, open) {
        (true, _) => Finding::ok("secret", "set; it is never shown"),
        (false, true) => Finding::note(
            "secret",
            "none: every host that reaches the port reaches registered memory",
        )
        .fix("KVFERRY_SECRET_FILE, the same file's content on every host"),
        (false, false) => Finding::ok("secret", "none, and none needed on loopback"),
    };
    finding.fact("set", set)
}

fn interfaces(host: &Host, own: &[InterfaceAddress]) -> Vec<Finding> {
    let mut addresses: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for known in own {
        addresses.entry(&known.interface).or_default().push(known.address.to_string());
    }
    let (mut findings, mut down) = (Vec::new(), Vec::new());
    for name in host.names("sys/class/net").iter().filter(|name| *name != "lo") {
        let addresses = addresses.remove(name.as_str()).unwrap_or_default();
        // Some drivers never say; one with addresses is used.
        let state = host.text(&format!("sys/class/net/{name}/operstate")).unwrap_or_default();
        if state == "up" || (state == "unknown" && !addresses.is_empty()) {
            findings.push(interface(host, name, &addresses));
        } else {
            down.push(name.clone());
        }
    }
    if findings.is_empty() {
        findings.push(
            Finding::note("nic", "none is up: only processes of this host can be reached")
                .fix("ip link set DEVICE up, and an address for it"),
        );
    }
    if !down.is_empty() {
        let finding = Finding::ok("nics_down", down.join(", ")).of("nics down");
        findings.push(finding.fact("names", json!(down)));
    }
    findings
}

fn interface(host: &Host, name: &str, addresses: &[String]) -> Finding {
    let read = |file: &str| host.number(&format!("sys/class/net/{name}/{file}"));
    let link = |file: &str| host.link(&format!("sys/class/net/{name}/{file}"));
    let (speed, mtu) = (read("speed").filter(|speed| *speed > 0), read("mtu"));
    let driver = link("device/driver").and_then(|path| Some(path.rsplit('/').next()?.to_owned()));
    let node = read("device/numa_node");
    let mut words = vec!["up".to_owned()];
    words.push(match speed {
        Some(mbit) if mbit >= 1000 => format!("{} Gbit/s", mbit as f64 / 1000.0),
        Some(mbit) => format!("{mbit} Mbit/s"),
        None => "speed not told".to_owned(),
    });
    words.extend(mtu.map(|mtu| format!("MTU {mtu}")));
    words.extend(driver.clone());
    words.extend(node.map(|node| format!("NUMA node {node}")));
    let shown: Vec<&str> =
        addresses.iter().map(String::as_str).filter(|a| !a.starts_with("fe80:")).collect();
    words.push(if shown.is_empty() { "no address".to_owned() } else { shown.join(", ") });
    let words = words.join(", ");
    let finding = match (speed, mtu) {
        (Some(FAST_MBIT..), Some(mtu)) if mtu < JUMBO => Finding::note("nic", words)
            .fix(format!("ip link set {name} mtu 9000, on every host and switch between them")),
        (_, Some(mtu)) if mtu < 1280 => {
            Finding::note("nic", words).fix(format!("ip link set {name} mtu 1500"))
        }
        _ => Finding::ok("nic", words),
    };
    finding
        .of(format!("nic {name}"))
        .fact("name", name)
        .fact("mbit_per_s", speed)
        .fact("mtu", mtu)
        .fact("driver", driver)
        .fact("numa_node", node)
        .fact("addresses", json!(addresses))
}

const TCP: &str = "proc/sys/net/ipv4";

fn congestion(host: &Host) -> Option<Finding> {
    let used = host.text(&format!("{TCP}/tcp_congestion_control"))?;
    let known = host.text(&format!("{TCP}/tcp_available_congestion_control")).unwrap_or_default();
    let reno = known.split_whitespace().any(|name| name == "reno");
    let mut words = format!("{used} between hosts");
    // What an agent does with connections of its own host.
    words.push_str(if reno { ", reno within this one" } else { " and within this one" });
    let finding = Finding::ok("congestion", words).fact("used", used);
    Some(finding.fact("available", json!(known.split_whitespace().collect::<Vec<_>>())))
}

fn buffers(host: &Host) -> Option<Finding> {
    // The kernel's own tuning goes up to the third number, regardless of the other limit.
    let most = |file: &str| -> Option<u64> {
        host.text(&format!("{TCP}/{file}"))?.split_whitespace().nth(2)?.parse().ok()
    };
    let (receive, send) = (most("tcp_rmem")?, most("tcp_wmem")?);
    let words =
        format!("receive up to {}, send up to {}", units::bytes(receive), units::bytes(send));
    let core = |file: &str| host.number(&format!("proc/sys/net/core/{file}"));
    let finding = if receive.min(send) < WINDOW {
        Finding::note("tcp_buffers", format!("{words}: less than a fast network holds in flight")).fix(
            "sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864' net.ipv4.tcp_wmem='4096 65536 67108864'",
        )
    } else {
        Finding::ok("tcp_buffers", words)
    };
    let finding = finding.fact("receive", receive).fact("send", send);
    Some(finding.fact("rmem_max", core("rmem_max")).fact("wmem_max", core("wmem_max")))
}

fn backlog(host: &Host) -> Option<Finding> {
    let limit = host.number("proc/sys/net/core/somaxconn")?;
    let short = format!("{limit}: many peers that call at once must call again");
    let fix = format!("sysctl -w net.core.somaxconn={BACKLOG}");
    let finding = Finding::ok("backlog", format!("{limit} connections"));
    Some(finding.note_if(limit < BACKLOG, short, &fix).fact("somaxconn", limit))
}

fn abort(host: &Host) -> Option<Finding> {
    let on = host.number(&format!("{TCP}/tcp_abort_on_overflow"))? > 0;
    let finding = Finding::ok("tcp_abort", "off: a full backlog resets no connection");
    let worse = "on: a burst of callers is reset instead of asked to wait";
    let finding = finding.note_if(on, worse, "sysctl -w net.ipv4.tcp_abort_on_overflow=0");
    Some(finding.of("tcp abort").fact("on", on))
}

fn slow_start(host: &Host) -> Option<Finding> {
    let on = host.number(&format!("{TCP}/tcp_slow_start_after_idle"))? > 0;
    let worse = "on: a stream that was idle begins slowly, at every handoff";
    let fix = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0";
    let finding = Finding::ok("slow_start", "off").note_if(on, worse, fix);
    Some(finding.of("slow start").fact("on", on))
}

fn ports(host: &Host) -> Option<Finding> {
    let range = host.text(&format!("{TCP}/ip_local_port_range"))?;
    let mut ends = range.split_whitespace().map(str::parse::<u64>);
    let (Some(Ok(first)), Some(Ok(last))) = (ends.next(), ends.next()) else { return None };
    let count = last.saturating_sub(first) + 1;
    let words = format!("{first} to {last} to call from");
    let fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'";
    let finding = Finding::ok("ports", words.as_str()).note_if(count < PORTS, words, fix);
    Some(finding.of("ports").fact("count", count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Mark;
    use crate::doctor::tests::{Tree, tries};

    fn own() -> Vec<InterfaceAddress> {
        vec![InterfaceAddress {
            interface: "eth0".into(),
            address: "10.0.0.7".parse().expect("an address"),
            prefix_len: 24,
        }]
    }

    fn on(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn the_address_is_judged_by_whether_peers_can_reach_it() {
        assert_eq!(listening(on("127.0.0.1:0"), &own()).mark, Mark::Note);
        assert_eq!(listening(on("0.0.0.0:7"), &own()).mark, Mark::Ok);
        assert_eq!(listening(on("10.0.0.7:7"), &own()).mark, Mark::Ok);
        assert_eq!(listening(on("10.0.0.8:7"), &own()).mark, Mark::Bad);
        let told =
            |told: &str| advertised(on("0.0.0.0:7"), told, AdvertisedBy::Option, &own()).mark;
        assert_eq!(told("10.0.0.7:7"), Mark::Ok);
        assert_eq!(told("node-3.cluster:7"), Mark::Ok);
        assert_eq!(told("10.0.0.8:7"), Mark::Note, "it may be translated");
        assert_eq!(told("127.0.0.1:7"), Mark::Bad);
        let by = AdvertisedBy::Variable("POD_IP");
        let found = advertised(on("0.0.0.0:0"), "10.0.0.7:0", by, &own());
        assert_eq!(found.finding, "10.0.0.7, from POD_IP");
    }

    #[test]
    fn a_configuration_that_no_agent_takes_is_bad_and_never_shows_the_secret() {
        let mut config = Config::default();
        config.listen = Some("nonsense".into());
        config.secret = kvferry::Secret::new("hush-hush");
        let settings = Settings::of(Ok(config.clone()));
        let findings = agent(&settings, &own());
        assert_eq!(findings[0].mark, Mark::Bad, "{findings:?}");
        config.listen = Some("0.0.0.0:0".into());
        let findings = agent(&Settings::of(Ok(config)), &own());
        assert!(findings.iter().any(|f| f.id == "secret" && f.mark == Mark::Ok), "{findings:?}");
        assert!(!format!("{findings:?}").contains("hush"));
        let mut open = Config::default();
        open.listen = Some("0.0.0.0:0".into());
        let findings = agent(&Settings::of(Ok(open)), &own());
        assert!(findings.iter().any(|f| f.id == "secret" && f.mark == Mark::Note), "{findings:?}");
    }

    #[test]
    fn settings_of_transports_are_shown_where_they_are_not_the_default() {
        let mut config = Config::default();
        let shown = |config: &Config| {
            let findings = agent(&Settings::of(Ok(config.clone())), &own());
            findings.into_iter().find(|found| found.id == "setting")
        };
        assert!(shown(&config).is_none());
        config.transport_settings.set("file_engine", "posix").expect("a value");
        let found = shown(&config).expect("it is not the default");
        assert_eq!((&*found.subject, found.mark), ("file_engine", Mark::Ok));
        assert!(found.finding.starts_with("posix: how files"), "{found:?}");
    }

    #[test]
    fn every_setting_of_a_transport_is_documented() {
        kvferry_mooncake::link();
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        let page = std::fs::read_to_string(page).expect("a file of the repository");
        for setting in TransportSettings::all() {
            let variable =
                setting.variable().map_or_else(|| "–".to_owned(), |it| format!("`{it}`"));
            let (name, about) = (setting.name(), setting.about());
            let row =
                format!("| `{name}` | {variable} | {about} | `{}` |", setting.default_value());
            assert!(page.contains(&row), "docs/configuration.md has to have this row:\n{row}");
        }
    }

    #[test]
    fn interfaces_are_shown_with_what_matters() {
        let tree = Tree::of(&[
            ("sys/class/net/eth0/operstate", "up"),
            ("sys/class/net/eth0/speed", "100000"),
            ("sys/class/net/eth0/mtu", "1500"),
            ("sys/class/net/eth0/device/numa_node", "1"),
            ("sys/class/net/eth1/operstate", "down"),
            ("sys/class/net/eth1/speed", "-1"),
            ("sys/class/net/lo/operstate", "unknown"),
        ]);
        let findings = interfaces(&tree.host(), &own());
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert_eq!(findings[0].subject, "nic eth0");
        assert_eq!(findings[0].finding, "up, 100 Gbit/s, MTU 1500, NUMA node 1, 10.0.0.7");
        assert!(findings[0].fix.as_deref().is_some_and(|fix| fix.contains("mtu 9000")));
        assert_eq!(findings[1].finding, "eth1");
        let none = interfaces(&Tree::of(&[]).host(), &[]);
        assert_eq!((none.len(), none[0].mark), (1, Mark::Note));
    }

    #[test]
    fn sysctls_that_hurt_come_with_their_fix() {
        let tree = Tree::of(&[
            ("proc/sys/net/ipv4/tcp_congestion_control", "cubic"),
            ("proc/sys/net/ipv4/tcp_available_congestion_control", "reno cubic"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456"),
            ("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304"),
            ("proc/sys/net/core/somaxconn", "128"),
            ("proc/sys/net/ipv4/tcp_abort_on_overflow", "1"),
            ("proc/sys/net/ipv4/tcp_slow_start_after_idle", "1"),
            ("proc/sys/net/ipv4/ip_local_port_range", "60000 60999"),
        ]);
        let group = check(&tree.host(), &tries(), &Settings::of(Ok(Config::default())));
        for id in ["tcp_buffers", "backlog", "tcp_abort", "slow_start", "ports"] {
            let found = group.findings.iter().find(|f| f.id == id).expect(id);
            assert_eq!(found.mark, Mark::Note, "{found:?}");
            assert!(found.fix.as_deref().is_some_and(|f| f.contains("sysctl -w")), "{found:?}");
        }
        let found = group.findings.iter().find(|f| f.id == "congestion").expect("it is known");
        assert_eq!(found.finding, "cubic between hosts, reno within this one");
    }
}
