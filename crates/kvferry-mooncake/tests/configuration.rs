//! The transport in configurations: its names, its setting, and how long the JSON of a version stays readable.

use kvferry::{Agent, Config, ErrorKind, Transports};

#[test]
fn an_agent_has_the_transport_once_it_is_linked() {
    let unknown = Agent::builder().setting("mooncake", true).build().expect_err("not linked");
    assert_eq!(unknown.kind(), ErrorKind::InvalidArgument, "{unknown}");
    assert!(unknown.to_string().contains("call kvferry_mooncake::link()"), "{unknown}");
    for name in [kvferry_mooncake::KIND.as_str(), "Mooncake-TCP"] {
        assert!(Transports::parse(name).is_err(), "{name} alone");
        let tcp = Transports::parse(&format!("tcp,{name}")).expect("known");
        assert_eq!(tcp, Transports::parse("tcp").expect("a name"));
    }
    let off = Config::from_json(r#"{"mooncake":false}"#).expect("known").transport_settings;
    assert_eq!(off.get("mooncake"), None);
    let only = Transports::only(kvferry_mooncake::link());
    assert_eq!(Transports::parse("Mooncake-TCP").expect("an alias"), only);
    assert_eq!(Transports::ALL.to_string(), "tcp,local,mooncake");
    let config = Config::from_json(r#"{"mooncake":"on"}"#).expect("linked");
    assert_eq!(config.transport_settings.get("mooncake"), Some("true"));
    for json in [r#"{"mooncake":"perhaps"}"#, r#"{"transports":"mooncake,unknown"}"#] {
        assert!(Config::from_json(json).is_err(), "{json}");
    }
    // The JSON of version 1 stays readable.
    let golden = r#"{"version":1,"name":"decode-0","listen":"0.0.0.0:18515","advertise":null,
        "transports":"tcp,mooncake","io_threads":4,"streams_per_peer":8,"checksum":"on",
        "silence_ms":3000,"timeout_ms":30000,"mooncake":true}"#;
    let config = Config::from_json(golden).expect("the JSON of version 1");
    assert!(config.transports.contains(kvferry_mooncake::KIND));
    assert_eq!(config.transport_settings.get("mooncake"), Some("true"));
    assert!(config.to_json().contains(r#""mooncake": true"#), "{}", config.to_json());
    assert_eq!(Config::from_json(&config.to_json()).expect("the output of to_json"), config);
}
