//! What agents cost, and that they give it back.

use super::*;
use kvferry_testkit::process::Child;
use std::thread;

over!(tcp: agents_that_come_and_go_leave_nothing_behind, peers_that_meet_and_part_leave_nothing_behind);
over!(local: agents_that_come_and_go_leave_nothing_behind, peers_that_meet_and_part_leave_nothing_behind);

/// What a process may grow by, once everything has happened that happens for the first time.
const GROWTH: u64 = MIB as u64;

fn assert_no_growth(then: &Value, now: &Value, what: &str) {
    for name in ["threads", "descriptors"] {
        assert_eq!(then[name], now[name], "{name} after {what}");
    }
    let memory = |of: &Value| of["memory_bytes"].as_u64().expect("a number");
    let grown = memory(now).saturating_sub(memory(then));
    assert!(grown <= GROWTH, "{grown} bytes more after {what}");
}

fn agents_that_come_and_go_leave_nothing_behind(transport: &str) {
    let _bound = bounded();
    let mut child = Child::spawn();
    // Two agents each time.
    let mut start_and_stop = |times: u32| {
        let config = json!({"transports": transport});
        child.call(json!({"op": "start_and_stop", "times": times, "config": config}))
    };
    let first = start_and_stop(20);
    let then = start_and_stop(100);
    assert_no_growth(&first, &then, "200 more agents");
}

fn peers_that_meet_and_part_leave_nothing_behind(transport: &str) {
    let _bound = bounded();
    let (mut target, address) = Child::with_agent(peer_config_over(transport));
    let to = target.allocate(64 * KIB, "w", 2);
    let mut child = Child::spawn();
    child.start(peer_config_over(transport));
    let from = child.allocate(64 * KIB, "", 1);
    let mut meet_and_part = |times: u32| {
        let mut asked = command("meet_and_part", &address, &from, &to.remote, 4096);
        asked["times"] = json!(times);
        let near = child.call(asked);
        let mut far = json!({});
        eventually(Duration::from_secs(5), "the target forgets who parted", || {
            far = target.call(json!({"op": "stats"}));
            (&far["sessions"], &far["streams"]) == (&json!(0), &json!(0))
        });
        let far = target.resources();
        let far = json!({
            "threads": far.threads, "descriptors": far.descriptors,
            "memory_bytes": far.memory_bytes,
        });
        (near, far)
    };
    let (near, far) = meet_and_part(100);
    let (near_then, far_then) = meet_and_part(1000);
    assert_no_growth(&near, &near_then, "1000 meetings, at the caller");
    assert_no_growth(&far, &far_then, "1000 meetings, at the target");
    assert!(target.call(json!({"op": "matches", "region": to.id, "seed": 1}))["matches"] == true);
}

#[test]
fn an_idle_agent_with_eight_sessions_uses_no_cpu() {
    let _bound = bounded();
    let (mut child, _) = Child::with_agent(json!({}));
    child.call(json!({"op": "sessions", "count": 8}));
    let stats = child.call(json!({"op": "stats"}));
    assert_eq!(stats["sessions"], 8, "{stats}");
    thread::sleep(Duration::from_millis(300));
    let before = child.resources().cpu;
    let time = Duration::from_secs(3);
    thread::sleep(time);
    let used = child.resources().cpu - before;
    // Nine agents live in that process; 0.5 % of a core for the one, with the factor of three.
    let allowed = time.mul_f64(0.005 * 3.0);
    assert!(used <= allowed, "idle agents used {used:?} of {time:?}; {allowed:?} is allowed");
}

#[test]
fn a_forked_process_is_told_so_and_the_agent_lives_on() {
    let _bound = bounded();
    let agent = agent();
    let to = agent.allocate(64 * KIB, Access::WRITE).expect("memory");
    let mut child = Child::spawn();
    child.start(peer_config());
    let from = child.allocate(64 * KIB, "", 1);
    child.call(command("write", agent.advertised(), &from, &to.remote(), 4096));
    for _ in 0..3 {
        let told = child.call(command("fork", agent.advertised(), &from, &to.remote(), 4096));
        assert_eq!(told["forked"], 3, "all three calls in the forked process say so");
        let began = Instant::now();
        child.call(command("write", agent.advertised(), &from, &to.remote(), 4096));
        assert_within(began, UNDELAYED, "a write after a fork");
    }
    assert!(content(&to) == Pattern::new(1).bytes(to.len()));
}

#[test]
fn sixty_four_agents_talk_to_each_other() {
    let _bound = bounded();
    let hub = agent();
    let from = source(&hub, 64 * KIB, 1);
    let others: Vec<_> = (0..63)
        .map(|_| {
            let other = Agent::builder().io_threads(1).start().expect("an agent");
            let to = other.allocate(64 * KIB, Access::READ_WRITE).expect("memory");
            (other, to)
        })
        .collect();
    for _ in 0..3 {
        let running: Vec<_> = others
            .iter()
            .map(|(other, to)| {
                let peer = hub.peer(other.advertised()).expect("an address");
                peer.write_async(batch(&from, &to.remote(), 4096), Options::default())
            })
            .collect();
        for transfer in running {
            let outcome = transfer.wait(Duration::from_secs(20)).expect("it ends");
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
    eventually(Duration::from_secs(5), "the hub forgets agents that said goodbye", || {
        let stats = hub.stats();
        (stats.sessions, stats.streams) == (0, 0)
    });
}

#[test]
fn a_storm_of_signals_is_nothing() {
    let _bound = bounded();
    let agent = agent();
    let len = 8 * MIB;
    let to = agent.allocate(len, Access::READ_WRITE).expect("memory");
    let mut child = Child::spawn();
    child.start(peer_config());
    child.call(json!({"op": "catch_signals"}));
    let from = child.allocate(len, "", 1);
    for (op, block) in [("write", len), ("write", 4096), ("read", 64 * KIB), ("write", 512)] {
        refill(&to, 1);
        let (mut signals, mut rounds) = (0, 0);
        // How many signals a call gets is the machine's choice, how many all get is not.
        while rounds < 10 || signals <= 20 {
            rounds += 1;
            child.send(command(op, agent.advertised(), &from, &to.remote(), block));
            let done = loop {
                child.disturb();
                signals += 1;
                if let Some(done) = child.reply_within(Duration::from_micros(300)) {
                    break done;
                }
            };
            done.unwrap_or_else(|e| panic!("{op} in blocks of {block}: {e:?}"));
        }
        assert!(content(&to) == Pattern::new(1).bytes(len), "{op} in blocks of {block}");
    }
}

fn masks_of_native_threads(pid: u32) -> Vec<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
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
fn an_agent_says_nothing_and_takes_no_signals() {
    let _bound = bounded();
    let mut child = Child::spawn();
    child.start(peer_config());
    // A thread names itself, once it runs.
    let mut masks = Vec::new();
    eventually(Duration::from_secs(2), "native threads run", || {
        masks = masks_of_native_threads(child.pid());
        masks.len() >= 2
    });
    for blocked in masks {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPIPE] {
            assert!(blocked & (1 << (signal - 1)) != 0, "signal {signal}: {blocked:#x}");
        }
    }
    // A life with all kinds of trouble in it.
    child.call(json!({"op": "start_and_stop", "times": 3, "config": {}}));
    let agent = agent();
    let gone = agent.allocate(64 * KIB, Access::WRITE).expect("memory");
    let from = child.allocate(64 * KIB, "", 1);
    let writing = command("write", agent.advertised(), &from, &gone.remote(), 4096);
    child.call(writing.clone());
    agent.unregister(&gone).expect("registered");
    child.try_call(writing.clone()).expect_err("unregistered");
    agent.shutdown();
    child.try_call(writing).expect_err("gone");
    child.call(json!({"op": "shutdown"}));
    assert_eq!(child.said(), "", "an agent is a guest");
}
