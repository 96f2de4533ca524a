//! Two hosts that can be cut off from each other: network namespaces with a bridge between them.
//! A cut removes the far host's port from the bridge, or has netem lose every frame: packets are
//! lost, and no reset is sent.
//!
//! And a program in a network namespace of its own, from which no other process is reached.

use crate::netem::{Impairments, Netem};
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};

/// A command that runs `program` in a network namespace of its own. Where none can be made, prints that `what` is skipped,
/// and why.
pub fn in_own_network_or_skip(what: &str, program: impl AsRef<OsStr>) -> Option<Command> {
    // Agents listen on the loopback device, which is down in a new namespace.
    let command = |program: &OsStr| {
        let mut unshare = Command::new("unshare");
        let run = r#"ip link set lo up && exec "$0" "$@""#;
        unshare.args(["--net", "--", "sh", "-c", run]).arg(program).stdin(Stdio::null());
        unshare
    };
    let why = match command(OsStr::new("true")).output() {
        Ok(output) if output.status.success() => return Some(command(program.as_ref())),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(e) => format!("unshare can't be run: {e}"),
    };
    println!("SKIPPED: {what}: {why}");
    None
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("ip can't be run: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("ip {arguments}: {}", text.trim()))
}

/// Three namespaces: two hosts and the network between them. The drop removes them.
#[derive(Debug)]
pub struct Network {
    /// The namespace of one host, whose address is [`Network::NEAR`].
    pub near: String,
    /// The namespace of the other, whose address is [`Network::FAR`].
    pub far: String,
    between: String,
    /// Moves the frames if there is no bridge.
    netem: Option<Netem>,
}

impl Network {
    /// The address of one host.
    pub const NEAR: &str = "10.77.0.1";
    /// The address of the other.
    pub const FAR: &str = "10.77.0.2";

    /// A network with a bridge. Where none can be made, prints that `what` is skipped, and why.
    pub fn or_skip(what: &str) -> Option<Self> {
        Self::made_or_skip(what, Self::new())
    }

    /// A network with netem. Where none can be made, prints that `what` is skipped, and why.
    pub fn with_netem_or_skip(what: &str) -> Option<Self> {
        Self::made_or_skip(what, Self::with_netem())
    }

    fn made_or_skip(what: &str, made: Result<Self, String>) -> Option<Self> {
        match made {
            Ok(network) => Some(network),
            Err(why) => {
                // Not through `println!`, which the test harness captures.
                let line = format!("SKIPPED: {what}: {why}\n");
                drop(std::io::stderr().write_all(line.as_bytes()));
                None
            }
        }
    }

    /// Two hosts that reach each other through a bridge.
    fn new() -> Result<Self, String> {
        let network = Self::hosts()?;
        let between = &network.between;
        ip(&format!("-n {between} link add bridge type bridge"))?;
        ip(&format!("-n {between} link set bridge up"))?;
        for port in ["to-near", "to-far"] {
            ip(&format!("-n {between} link set {port} master bridge"))?;
        }
        Ok(network)
    }

    /// Two hosts with netem between them, which delays and loses nothing at first.
    fn with_netem() -> Result<Self, String> {
        let mut network = Self::hosts()?;
        // Without segmentation offload a lost frame is 1 500 bytes, as on a wire, not 64 KiB.
        for host in [&network.near, &network.far] {
            ip(&format!("-n {host} link set eth0 gso_max_segs 1"))?;
        }
        let netem = Netem::between(&network.between, ["to-near", "to-far"]);
        network.netem = Some(netem.map_err(|e| format!("frames can't be moved: {e}"))?);
        Ok(network)
    }

    fn hosts() -> Result<Self, String> {
        let name = |end: &str| format!("kvferry-{}-{end}", std::process::id());
        let (near, far, between) = (name("near"), name("far"), name("between"));
        let network = Self { near, far, between, netem: None };
        let Self { near, far, between, .. } = &network;
        for namespace in [near, far, between] {
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        for (host, port, address) in [(near, "to-near", Self::NEAR), (far, "to-far", Self::FAR)] {
            ip(&format!("-n {between} link add {port} type veth peer name eth0 netns {host}"))?;
            ip(&format!("-n {between} link set {port} up"))?;
            ip(&format!("-n {host} addr add {address}/24 dev eth0"))?;
            ip(&format!("-n {host} link set eth0 up"))?;
        }
        Ok(network)
    }

    /// The impairments between the hosts.
    pub fn impairments(&self) -> &Impairments {
        &self.netem.as_ref().expect("a network with netem").impairments
    }

    /// Replaces the far host's address.
    pub fn readdress(&self, from: &str, to: &str) {
        let far = &self.far;
        // In this order: without its first address, an interface drops the others of that subnet.
        ip(&format!("-n {far} addr del {from}/24 dev eth0")).expect("its address");
        ip(&format!("-n {far} addr add {to}/24 dev eth0")).expect("a free address");
    }

    /// Loses everything between the hosts from here on, without a reset.
    pub fn cut(&self) {
        match &self.netem {
            Some(netem) => netem.impairments.lose(1000),
            None => self.port_to_far("nomaster"),
        }
    }

    /// Lets the hosts reach each other again.
    pub fn heal(&self) {
        match &self.netem {
            Some(netem) => netem.impairments.lose(0),
            None => self.port_to_far("master bridge"),
        }
    }

    fn port_to_far(&self, how: &str) {
        ip(&format!("-n {} link set to-far {how}", self.between)).expect("it was a port");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.netem = None;
        for namespace in [&self.near, &self.far, &self.between] {
            drop(ip(&format!("netns del {namespace}")));
        }
    }
}
