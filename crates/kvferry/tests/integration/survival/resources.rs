//! Memory, descriptors, threads and CPU time of agents.

use super::*;
use kvferry_sys::map::Mapping;
use kvferry_testkit::process::Resources;

over!(
    tcp: started_and_stopped_agents_leak_nothing,
    connected_and_disconnected_peers_leak_nothing,
    signals_do_not_disturb_transfers,
);
over!(
    local: started_and_stopped_agents_leak_nothing,
    connected_and_disconnected_peers_leak_nothing,
    signals_do_not_disturb_transfers,
);

/// The largest growth of a process after the first round, in bytes.
const GROWTH: u64 = MIB as u64;

fn threads_and_descriptors(of: &Child) -> (usize, usize) {
    let now = of.resources();
    (now.threads, now.descriptors)
}

/// Resources of a process once its threads and descriptors change no more.
fn resources_at_rest(of: &Child) -> Resources {
    let (threads, descriptors) = comes_to_rest(|| threads_and_descriptors(of));
    Resources { threads, descriptors, ..of.resources() }
}

/// Waits for threads and descriptors to end: the kernel may list them for a while, `then`, too.
fn assert_no_growth(then: &Resources, of: &Child, what: &str) {
    eventually(&format!("threads and descriptors are no more than before {what}"), || {
        let (threads, descriptors) = threads_and_descriptors(of);
        threads <= then.threads && descriptors <= then.descriptors
    });
    let grown = of.resources().memory_bytes.saturating_sub(then.memory_bytes);
    assert!(grown <= GROWTH, "{grown} bytes more after {what}");
}

fn started_and_stopped_agents_leak_nothing(transport: &str) {
    let _bound = bounded();
    let mut child = Child::spawn();
    // Each round starts two agents.
    let start_and_stop = |child: &mut Child, times: u32| {
        let config = json!({"transports": transport, "silence_ms": NEVER.as_millis() as u64});
        child.call(json!({"op": "start_and_stop", "times": times, "config": config}));
    };
    start_and_stop(&mut child, 20);
    let first = resources_at_rest(&child);
    start_and_stop(&mut child, 100);
    assert_no_growth(&first, &child, "200 more agents");
}

fn connected_and_disconnected_peers_leak_nothing(transport: &str) {
    let _bound = bounded();
    let (mut target, address) = Child::with_agent(peer_config_over(transport));
    let to = target.allocate(64 * KIB, "w", 2);
    let mut child = Child::spawn();
    child.start(peer_config_over(transport));
    let from = child.allocate(64 * KIB, "", 1);
    let connect_and_disconnect = |child: &mut Child, target: &mut Child, times: u32| {
        let mut asked = command("connect_and_disconnect", &address, &from, &to.remote, 4096);
        asked["times"] = json!(times);
        child.call(asked);
        eventually("the target ends the sessions", || {
            let far = target.stats();
            (&far["sessions"], &far["streams"]) == (&json!(0), &json!(0))
        });
    };
    connect_and_disconnect(&mut child, &mut target, 100);
    let (near, far) = (resources_at_rest(&child), resources_at_rest(&target));
    connect_and_disconnect(&mut child, &mut target, 1000);
    assert_no_growth(&near, &child, "1000 connections, at the caller");
    assert_no_growth(&far, &target, "1000 connections, at the target");
    assert!(target.matches(&to, 1));
}

#[test]
fn an_idle_agent_with_eight_sessions_uses_no_cpu() {
    let _bound = bounded();
    // With the default silence limit, by which a process that does not run for a while ends its sessions.
    let child = in_one_try(|| {
        let (mut child, _) = Child::with_agent(json!({}));
        let connected = child.try_call(json!({"op": "sessions", "count": 8}));
        connected.map_err(|refusal| refusal.text)?;
        let stats = child.stats();
        if stats["sessions"] == 8 { Ok(child) } else { Err(stats.to_string()) }
    });
    thread::sleep(Duration::from_millis(300));
    let time = Duration::from_secs(3);
    // That process has nine agents; 0.5 % of a core for each, times three.
    let allowed = time.mul_f64(0.005 * 3.0);
    // Other programs slow a wake-up down: one of a few turns is enough.
    let mut turns = Vec::new();
    while turns.last().is_none_or(|used| *used > allowed) {
        assert!(turns.len() < 5, "idle agents used {turns:?} of {time:?}; {allowed:?} is allowed");
        let before = child.resources().cpu;
        thread::sleep(time);
        turns.push(child.resources().cpu - before);
    }
}

#[test]
fn calls_in_a_forked_child_fail_and_the_parent_goes_on() {
    let _bound = bounded();
    let agent = agent();
    let to = agent.allocate(64 * KIB, Access::WRITE).expect("memory");
    let mut child = Child::spawn();
    child.start(peer_config());
    let from = child.allocate(64 * KIB, "", 1);
    child.call(command("write", agent.advertised(), &from, &to.remote(), 4096));
    for _ in 0..3 {
        let reply = child.call(command("fork", agent.advertised(), &from, &to.remote(), 4096));
        assert_eq!(reply["forked"], 3, "all three calls in the forked child fail");
        child.call(command("write", agent.advertised(), &from, &to.remote(), 4096));
    }
    assert!(content(&to) == Pattern::new(1).bytes(to.len()));
}

#[test]
fn sixty_four_agents_write_to_and_read_from_each_other() {
    let _bound = bounded();
    let hub = agent();
    let from = source(&hub, 64 * KIB, 1);
    let others: Vec<_> = (0..63)
        .map(|_| {
            let other = Agent::builder().io_threads(1).silence(NEVER).start().expect("an agent");
            let to = other.allocate(64 * KIB, Access::READ_WRITE).expect("memory");
            (other, to)
        })
        .collect();
    for _ in 0..3 {
        let running: Vec<_> = others
            .iter()
            .map(|(other, to)| {
                let peer = hub.peer(other.advertised()).expect("an address");
                peer.write_async(&batch(&from, &to.remote(), 4096), &Options::default())
            })
            .collect();
        for transfer in running {
            let outcome = transfer.wait(PATIENCE).expect("it ends");
            outcome.expect("a healthy peer");
        }
    }
    let wanted = Pattern::new(1).bytes(64 * KIB);
    assert!(others.iter().all(|(_, to)| content(to) == wanted));
    assert_eq!(hub.stats().sessions, 63);
    let back = hub.allocate(64 * KIB * 63, Access::WRITE).expect("memory");
    thread::scope(|scope| {
        for (i, (other, to)) in others.iter().enumerate() {
            let (hub, back) = (&hub, &back);
            scope.spawn(move || {
                let mut batch = Batch::new();
                let at = (i * 64 * KIB) as u64;
                batch.push(to, 0, &back.remote(), at, 64 * KIB as u64).expect("inside");
                let peer = other.peer(hub.advertised()).expect("an address");
                peer.write(&batch, &Options::default()).expect("a healthy peer");
            });
        }
    });
    assert!(content(&back).chunks(64 * KIB).all(|piece| piece == wanted));
    for (other, _) in &others {
        other.shutdown();
    }
    eventually("the hub forgets agents that said goodbye", || {
        let stats = hub.stats();
        (stats.sessions, stats.streams) == (0, 0)
    });
}

fn signals_do_not_disturb_transfers(transport: &str) {
    let _bound = bounded();
    let len = 16 * MIB;
    // Not memory of the agent, which `local` would map: copies are system calls.
    let to = Mapping::anonymous(len).expect("memory");
    let agent = agent_over(transport);
    // SAFETY: the agent is shut down before the mapping goes, and the bytes are only copied.
    let region = unsafe { agent.register(to.as_ptr(), len, Access::READ_WRITE) }.expect("free");
    let mut child = Child::spawn();
    child.start(peer_config_over(transport));
    child.call(json!({"op": "catch_signals"}));
    let from = child.allocate(len, "", 1);
    for (op, block) in [("write", len), ("write", 4096), ("read", 64 * KIB), ("write", 512)] {
        to.span(0, len).copy_from(&Pattern::new(1).bytes(len));
        let (mut signals, mut rounds) = (0, 0);
        // The number of signals per call varies; the total must reach 40.
        while rounds < 20 || signals <= 40 {
            rounds += 1;
            child.send(command(op, agent.advertised(), &from, &region.remote(), block));
            let done = loop {
                child.interrupt();
                signals += 1;
                if let Some(done) = child.reply_within(Duration::from_micros(300)) {
                    break done;
                }
            };
            done.unwrap_or_else(|e| panic!("{op} in blocks of {block}: {e:?}"));
        }
        let mut bytes = vec![0; len];
        to.span(0, len).copy_to(&mut bytes);
        assert!(bytes == Pattern::new(1).bytes(len), "{op} in blocks of {block}");
    }
    agent.shutdown();
}

fn masks_of_native_threads(pid: u32) -> Vec<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    let native = tasks.flatten().filter_map(|task| {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).ok();
        read("comm")?.starts_with("kvferry").then_some(())?;
        let status = read("status")?;
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    native.collect()
}

#[test]
fn an_agent_prints_nothing_and_its_threads_block_all_signals() {
    let _bound = bounded();
    let mut child = Child::spawn();
    child.start(peer_config());
    // A thread sets its name after its start.
    let mut masks = Vec::new();
    eventually("native threads run", || {
        masks = masks_of_native_threads(child.pid());
        masks.len() >= 2
    });
    for blocked in masks {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPIPE] {
            assert!(blocked & (1 << (signal - 1)) != 0, "signal {signal}: {blocked:#x}");
        }
    }
    // Cause errors of several kinds.
    let config = json!({"silence_ms": NEVER.as_millis() as u64});
    child.call(json!({"op": "start_and_stop", "times": 3, "config": config}));
    let agent = agent();
    let gone = agent.allocate(64 * KIB, Access::WRITE).expect("memory");
    let from = child.allocate(64 * KIB, "", 1);
    let writing = command("write", agent.advertised(), &from, &gone.remote(), 4096);
    child.call(writing.clone());
    agent.unregister(&gone).expect("registered");
    child.try_call(writing.clone()).expect_err("unregistered");
    agent.shutdown();
    child.try_call(writing).expect_err("the peer is shut down");
    child.call(json!({"op": "shutdown"}));
    assert_eq!(child.stderr(), "", "an agent prints nothing");
}

/// Number of connections to a port of this host with bytes that the process has not read.
fn connections_with_bytes(port: &str) -> usize {
    let port: u16 = port.parse().expect("a number");
    let table = std::fs::read_to_string("/proc/net/tcp").expect("this process's network");
    let has_bytes = |line: &&str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let [local, _, state, queues] = [(); 4].map(|()| fields.next().unwrap_or_default());
        let unread = queues.split_once(':').is_some_and(|(_, unread)| unread != "00000000");
        local.ends_with(&format!(":{port:04X}")) && state == "01" && unread
    };
    table.lines().filter(has_bytes).count()
}

#[test]
fn six_hundred_peers_that_connect_at_once_all_succeed() {
    let _bound = bounded();
    let mut child = Child::spawn();
    // A long limit, so that a slow machine can serve all of them. There are 256 places.
    let mut config = peer_config();
    config["listen"] = json!("0.0.0.0:0");
    config["advertise"] = json!("127.0.0.1");
    let address = child.start(config);
    let port = address.rsplit(':').next().expect("host:port").to_owned();
    let to = child.allocate(4 * KIB, "w", 2);
    let tcp = Transports::parse("tcp").expect("a name");
    let agent = Agent::builder().silence(NEVER).transports(tcp).start().expect("an agent");
    let from = source(&agent, 4 * KIB, 1);
    // All have connected and sent their hello before the first is accepted.
    child.stop();
    let running: Vec<_> = (0..600)
        .map(|i| {
            let peer = agent.peer(&format!("127.7.{}.{}:{port}", i / 200, 1 + i % 200));
            let moves = batch(&from, &to.remote, 4 * KIB);
            peer.expect("an address").write_async(&moves, &within(NEVER))
        })
        .collect();
    eventually("each has sent its hello", || connections_with_bytes(&port) == 600);
    child.resume();
    let outcomes: Vec<_> =
        running.iter().map(|transfer| transfer.wait(PATIENCE).expect("ends")).collect();
    let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert!(failed.is_empty(), "{} of 600 failed: {:?}", failed.len(), failed[0]);
    let stats = child.stats();
    assert_eq!(stats["sessions"], 600, "{stats}");
}
