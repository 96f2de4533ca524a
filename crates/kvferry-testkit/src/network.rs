//! Two hosts that can be cut off from each other: network namespaces with a bridge between them,
//! whose far port is pulled out. Packets are lost then, without a reset.

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
}

impl Network {
    /// The address of one host.
    pub const NEAR: &str = "10.77.0.1";
    /// The address of the other.
    pub const FAR: &str = "10.77.0.2";

    /// A network; where none can be made, a line says what is skipped and why.
    pub fn or_skip(what: &str) -> Option<Self> {
        match Self::new() {
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
        let name = |end: &str| format!("kvferry-{}-{end}", std::process::id());
        let network = Self { near: name("near"), far: name("far"), between: name("between") };
        let Self { near, far, between } = &network;
        for namespace in [near, far, between] {
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        ip(&format!("-n {between} link add bridge type bridge"))?;
        ip(&format!("-n {between} link set bridge up"))?;
        for (host, port, address) in [(near, "to-near", Self::NEAR), (far, "to-far", Self::FAR)] {
            ip(&format!("-n {between} link add {port} type veth peer name eth0 netns {host}"))?;
            ip(&format!("-n {between} link set {port} master bridge up"))?;
            ip(&format!("-n {host} addr add {address}/24 dev eth0"))?;
            ip(&format!("-n {host} link set eth0 up"))?;
        }
        Ok(network)
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
        for namespace in [&self.near, &self.far, &self.between] {
            drop(ip(&format!("netns del {namespace}")));
        }
    }
}
