//! Two hosts that can be cut off from each other: network namespaces with a bridge between them,
//! whose far port is pulled out. Packets are lost then, without a reset.

use crate::weather::{Sky, Weather};
use std::io::Write;
use std::process::{Command, Stdio};

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

/// Three namespaces: two hosts and the network between them. Removed on drop.
#[derive(Debug)]
pub struct Network {
    /// The namespace of one host, whose address is [`Network::NEAR`].
    pub near: String,
    /// The namespace of the other, whose address is [`Network::FAR`].
    pub far: String,
    between: String,
    /// What moves the frames, if no bridge does.
    weather: Option<Weather>,
}

impl Network {
    /// The address of one host.
    pub const NEAR: &str = "10.77.0.1";
    /// The address of the other.
    pub const FAR: &str = "10.77.0.2";

    /// A network; where none can be made, a line says what is skipped and why.
    pub fn or_skip(what: &str) -> Option<Self> {
        Self::made_or_skip(what, Self::new())
    }

    /// A network with weather; where none can be made, a line says what is skipped and why.
    pub fn with_weather_or_skip(what: &str) -> Option<Self> {
        Self::made_or_skip(what, Self::with_weather())
    }

    fn made_or_skip(what: &str, made: Result<Self, String>) -> Option<Self> {
        match made {
            Ok(network) => Some(network),
            Err(why) => {
                // Not through `println!`: the harness would keep it to itself.
                let line = format!("SKIPPED: {what}: {why}\n");
                drop(std::io::stderr().write_all(line.as_bytes()));
                None
            }
        }
    }

    /// Two hosts that reach each other.
    ///
    /// # Errors
    /// What can't be done here: it takes root, and the `ip` command.
    pub fn new() -> Result<Self, String> {
        let network = Self::hosts()?;
        let between = &network.between;
        ip(&format!("-n {between} link add bridge type bridge"))?;
        ip(&format!("-n {between} link set bridge up"))?;
        for port in ["to-near", "to-far"] {
            ip(&format!("-n {between} link set {port} master bridge"))?;
        }
        Ok(network)
    }

    /// Two hosts with weather between them, fair at first.
    ///
    /// # Errors
    /// As [`Network::new`]; it also takes raw sockets.
    pub fn with_weather() -> Result<Self, String> {
        let mut network = Self::hosts()?;
        // Frames as on a wire, not as between two kernels: a loss is one of 1 500 bytes.
        for host in [&network.near, &network.far] {
            ip(&format!("-n {host} link set eth0 gso_max_segs 1"))?;
        }
        let weather = Weather::between(&network.between, ["to-near", "to-far"]);
        network.weather = Some(weather.map_err(|e| format!("frames can't be moved: {e}"))?);
        Ok(network)
    }

    fn hosts() -> Result<Self, String> {
        let name = |end: &str| format!("kvferry-{}-{end}", std::process::id());
        let (near, far, between) = (name("near"), name("far"), name("between"));
        let network = Self { near, far, between, weather: None };
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

    /// The weather between the two.
    ///
    /// # Panics
    /// If the network was made without.
    pub fn sky(&self) -> &Sky {
        &self.weather.as_ref().expect("a network with weather").sky
    }

    /// The far host has another address from here on, and its old one no more.
    ///
    /// # Panics
    /// If the network was taken apart meanwhile.
    pub fn readdress(&self, from: &str, to: &str) {
        let far = &self.far;
        // In this order: with its first address, an interface loses those of the same network.
        ip(&format!("-n {far} addr del {from}/24 dev eth0")).expect("its address");
        ip(&format!("-n {far} addr add {to}/24 dev eth0")).expect("a free address");
    }

    /// From here on everything between the two is lost; nobody is told.
    ///
    /// # Panics
    /// If the network was taken apart meanwhile.
    pub fn cut(&self) {
        ip(&format!("-n {} link set to-far nomaster", self.between)).expect("it was a port");
    }

    /// The two reach each other again.
    ///
    /// # Panics
    /// If the network was taken apart meanwhile.
    pub fn heal(&self) {
        ip(&format!("-n {} link set to-far master bridge", self.between)).expect("it was a port");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.weather = None;
        for namespace in [&self.near, &self.far, &self.between] {
            drop(ip(&format!("netns del {namespace}")));
        }
    }
}
