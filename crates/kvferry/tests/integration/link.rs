//! A transport of another crate, which a program links.

use kvferry::transport::{Service, Start, Startup, Transport, TransportSetting, link};
use kvferry::{Agent, Capabilities, Config, Error, Fence, Result, TransportKind, Transports};
use std::sync::Arc;

/// A transport by its name. Its setting keeps agents from starting.
struct Elsewhere(&'static str);

impl Transport for Elsewhere {
    fn kind(&self) -> TransportKind {
        TransportKind::new(self.0)
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["far"]
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Fence::PeerExit, Fence::Local)
    }
}

static BESIDE: TransportSetting = TransportSetting::switch("elsewhere_beside", None, "a test");

impl Start for Elsewhere {
    fn settings(&self) -> &'static [TransportSetting] {
        std::slice::from_ref(&BESIDE)
    }

    fn is_native(&self) -> bool {
        false
    }

    fn start(&self, cx: &Startup<'_>) -> Result<Arc<dyn Service>> {
        if cx.settings.is_on(&BESIDE) {
            return Err(Error::invalid("elsewhere is beside"));
        }
        Ok(Arc::new(Self(self.0)))
    }
}

impl Service for Elsewhere {}

#[test]
fn a_transport_that_is_linked_has_its_names_and_settings_wherever_they_are_read() {
    assert!(Transports::parse("elsewhere").is_err());
    let before = Transports::parse("all").expect("a name");
    let kind = link(&Elsewhere("elsewhere"));
    assert_eq!((kind, link(&Elsewhere("elsewhere"))), (TransportKind::new("elsewhere"), kind));
    assert_eq!(link(&Elsewhere("tcp")), TransportKind::TCP, "the program has it");
    let only = Transports::only(kind);
    assert!(before.contains(kind) && before == Transports::ALL && only != before);
    for name in ["Elsewhere", "far"] {
        assert_eq!(Transports::parse(name).expect("linked"), only, "{name}");
    }
    let text = format!(r#"{{"transports":"{only}","elsewhere_beside":true}}"#);
    let config = Config::from_json(&text).expect("linked");
    assert_eq!(Config::from_json(&config.to_json()).expect("own output"), config);
    let mut all = config.clone();
    all.transports = Transports::ALL;
    assert_eq!(Config::from_json(&all.to_json()).expect("own output"), all);
    let refused = Agent::start(config).expect_err("it starts with the agent");
    assert_eq!(refused.to_string(), "elsewhere is beside");
    Agent::start(Config::default()).expect("its setting is off").shutdown();
}
