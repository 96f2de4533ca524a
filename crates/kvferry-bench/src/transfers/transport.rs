//! The transport that a bench measures, and whether this build and the two agents have it.

use kvferry::{AgentBuilder, Transports};

use crate::failure::Failure;

/// A transport by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    /// The choice of the two agents.
    Auto,
    Tcp,
    /// The transport within a host.
    Local,
}

impl Transport {
    pub(super) fn parse(name: &str) -> Result<Transport, Failure> {
        match name {
            "auto" => Ok(Transport::Auto),
            "tcp" => Ok(Transport::Tcp),
            "local" => Ok(Transport::Local),
            _ => Err(Failure::Usage(format!("--transport {name}: known are tcp, local and auto"))),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Tcp => "tcp",
            Transport::Local => "local",
        }
    }

    /// Transports of the measuring agent, as in `KVFERRY_TRANSPORTS`. `local` sessions begin over `tcp`.
    pub(super) fn allowed(self) -> Option<&'static str> {
        match self {
            Transport::Auto => None,
            Transport::Tcp => Some("tcp"),
            Transport::Local => Some("tcp,local"),
        }
    }

    /// Whether this build has it.
    pub(super) fn is_known(self) -> bool {
        self.allowed().is_none_or(|allowed| Transports::parse(allowed).is_ok())
    }

    /// Whether the agents chose this one.
    pub(super) fn is(self, chosen: &str) -> bool {
        self == Transport::Auto || self.name() == chosen
    }

    pub(super) fn allow(self, builder: AgentBuilder) -> Result<AgentBuilder, Failure> {
        Ok(match self.allowed() {
            Some(allowed) => builder.transports(Transports::parse(allowed)?),
            None => builder,
        })
    }
}
