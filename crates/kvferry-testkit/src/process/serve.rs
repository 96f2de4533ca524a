//! A child's side: it reads commands, runs them with an agent of its own, and replies.
//!
//! | module | commands |
//! |---|---|
//! | [`command`] | how arguments are read |
//! | [`regions`] | memory: allocate, fill, compare, unregister |
//! | [`transfers`] | writes, reads, cancels, writers in the background |
//! | [`churn`] | agents and sessions that come and go |
//! | [`fork`] | calls in a forked process |
//! | [`kernel`] | signals, limits, refused system calls, another user |

mod churn;
mod command;
mod fork;
mod kernel;
mod regions;
mod transfers;

use super::mesh::Mesh;
use super::{CHILD, REPLY};
use command::Command;
use kvferry::{Agent, Channel, Config, Message, MessageHandler, Peer, Transfer};
use kvferry_sys::map::Mapping;
use regions::ServedRegion;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::Arc;
use transfers::Writer;

/// Serves commands until the parent closes its end, and exits, in a child. Returns at once
/// elsewhere.
pub fn serve_if_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    kernel::die_with_the_parent();
    let mut server = Server::default();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).expect("commands are JSON");
        let reply = match server.serve(Command(&command)) {
            Ok(reply) => reply,
            Err(error) => json!({"error": {
                "kind": error.kind().as_str(),
                "text": error.to_string(),
                "quiesced": error.quiesced(),
            }}),
        };
        // The test harness may have left its own line unfinished.
        let mut out = std::io::stdout().lock();
        drop(write!(out, "\n{REPLY}{reply}\n"));
        drop(out.flush());
    }
    std::process::exit(0);
}

type Outcome = Result<Value, kvferry::Error>;

#[derive(Default)]
struct Server {
    agent: Option<Agent>,
    regions: HashMap<u64, ServedRegion>,
    /// Memory of regions that were dropped; peers may still write it.
    forgotten: Vec<Mapping>,
    transfers: HashMap<u64, Transfer>,
    writers: HashMap<u64, Writer>,
    /// Other agents of this process, connected with `agent`.
    idle: Vec<(Agent, Peer)>,
    mesh: Option<Mesh>,
    last_id: u64,
}

/// Starts an agent with the settings that [`Child::with_agent`](super::Child::with_agent) lists;
/// others come from the environment.
fn start(settings: &Value) -> Result<Agent, kvferry::Error> {
    let mut config = value(Config::from_env()?);
    for (name, setting) in settings.as_object().expect("settings by name") {
        config[name] = setting.clone();
    }
    let secret = config.as_object_mut().and_then(|config| config.remove("secret"));
    let config = serde_json::from_value(config).expect("settings of an agent");
    let builder = Agent::builder().config(config);
    match secret.as_ref().and_then(Value::as_str) {
        Some(secret) => builder.secret(secret.as_bytes()).start(),
        None => builder.start(),
    }
}

fn value(of: impl serde::Serialize) -> Value {
    serde_json::to_value(of).expect("plain values")
}

impl Server {
    fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("the parent started the agent")
    }

    fn mesh(&self) -> &Mesh {
        self.mesh.as_ref().expect("the parent started the mesh")
    }

    fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn serve(&mut self, command: Command<'_>) -> Outcome {
        match command.text("op") {
            "hello" => {}
            "start" => {
                let agent = self.agent.insert(start(command.get("config"))?);
                let incarnation = agent.incarnation().to_string();
                return Ok(json!({"address": agent.advertised(), "incarnation": incarnation}));
            }
            "shutdown" => self.agent().shutdown(),
            "stats" => return Ok(value(self.agent().stats())),
            "echo" => {
                let set = self.agent().set_message_handler(Arc::new(Echo));
                set.expect("the agent has no handler yet");
            }
            "notifications" => {
                let notifications = self.agent().notifications().into_iter();
                let names: Vec<_> = notifications.map(|n| n.name).collect();
                return Ok(json!({"names": names}));
            }

            "allocate" => return self.allocate(command),
            "fill" => return self.fill(command),
            "digest" => return self.digest(command),
            "watch" => return self.watch(command),
            "matches" => return self.matches(command),
            "unregister" => return self.unregister(command),
            "release" => return self.release(command),

            "connect" => return self.connect(command),
            "write" => return self.write(command),
            "read" => return self.read(command),
            "write_async" => return self.write_async(command),
            "cancel" => return self.cancel(command),
            "wait" => return self.wait(command),
            "keep_writing" => return self.keep_writing(command),
            "stop_writing" => return self.stop_writing(command),

            "start_and_stop" => return self.start_and_stop(command),
            "connect_and_disconnect" => return self.connect_and_disconnect(command),
            "sessions" => return self.sessions(command),

            "mesh_start" => {
                self.mesh = Some(Mesh::start(self.agent(), command.value("plan"))?);
            }
            "mesh_join" => self.mesh().join(command.value("member")),
            "mesh_report" => return Ok(value(self.mesh().report())),
            "mesh_stop" => {
                let mesh = self.mesh.take().expect("the parent started the mesh");
                return Ok(value(mesh.stop()));
            }

            "fork" => return self.fork(command),
            "limit_descriptors" => kernel::limit_descriptors(command.number("limit")),
            "deny_process_vm" => kernel::deny_process_vm(),
            "become_user" => {
                return Ok(json!({"done": kernel::become_user(command.number("uid") as u32)}));
            }
            "catch_signals" => kernel::catch_signals(),
            other => panic!("unknown command {other}"),
        }
        Ok(json!({}))
    }
}

/// Sends every message back.
struct Echo;

impl MessageHandler for Echo {
    fn began(&self, _: &Channel) {}

    fn received(&self, channel: &Channel, message: Message<'_>) {
        drop(channel.send(message.to_vec()));
    }

    fn ended(&self, _: &Channel, _: &kvferry::Error) {}
}
