//! Seeds for the decoders that are private to the agent. Their oracles are in `kvferry::fuzzing` and
//! `kvferry_mooncake::fuzzing`, beside the code that they test.

use kvferry::{Access, Config, Incarnation, RegionId, RemoteRegion};

fn mooncake_frame(kind: u8, json: &str) -> Vec<u8> {
    [&(json.len() as u64 + 1).to_le_bytes()[..], &[kind], json.as_bytes()].concat()
}

/// Handshakes of stock peers and of ours.
pub fn handshakes() -> Vec<Vec<u8>> {
    let v2 = r#"{"name":"127.0.0.1:15986","protocol":"tcp","tcp_data_host":"127.0.0.1","tcp_data_port":16086,"tcp_proto_version":2,"rdma_server_name":"","timestamp":"x","devices":[{"gid":"x"}],"buffers":[{"name":"a:1","addr":1,"length":2,"rkey":[1]}]}"#;
    let v1 = r#"{"name":"h:1","protocol":"rdma,tcp","tcp_data_port":7,"buffers":[]}"#;
    let ours = r#"{"name":"a","protocol":"tcp","kvferry":{"version":1,"incarnation":"00ff"}}"#;
    let notify = r#"{"name":"n","notify_msg":"m"}"#;
    vec![
        mooncake_frame(1, v2),
        mooncake_frame(1, v1),
        mooncake_frame(1, ours),
        mooncake_frame(2, notify),
        mooncake_frame(3, r#"{"status":"success"}"#),
        mooncake_frame(0, "{}"),
    ]
}

/// Heads of requests and statuses.
pub fn data() -> Vec<Vec<u8>> {
    let mut head = [0; 24];
    head[..8].copy_from_slice(&4096u64.to_le_bytes());
    head[8..16].copy_from_slice(&0x7f00_0000_0000u64.to_le_bytes());
    head[16] = 0x81;
    vec![head.to_vec(), 0x4d43_5456_0000_0001u64.to_le_bytes().to_vec()]
}

fn region() -> RemoteRegion {
    RemoteRegion {
        incarnation: Incarnation(0x0123_4567_89ab_cdef),
        id: RegionId(3),
        addr: 0x7f00_0000_0000,
        len: 1 << 30,
        access: Access::READ_WRITE,
    }
}

pub fn regions() -> Vec<Vec<u8>> {
    vec![region().to_bytes()]
}

/// Bodies of requests and answers on the control connection.
pub fn services() -> Vec<Vec<u8>> {
    kvferry::fuzzing::service_bodies(&region())
}

/// Parses a configuration that may name every transport.
pub fn config(bytes: &[u8]) {
    kvferry_mooncake::link();
    kvferry::fuzzing::config(bytes);
}

pub fn configs() -> Vec<Vec<u8>> {
    kvferry_mooncake::link();
    let golden = r#"{"version":1,"name":"decode-0","listen":"0.0.0.0:18515","advertise":null,"transports":"tcp,mooncake","io_threads":4,"streams_per_peer":8,"checksum":"on","silence_ms":3000,"timeout_ms":30000,"mooncake":true}"#;
    vec![golden.into(), Config::default().to_json().into(), b"{}".to_vec()]
}
