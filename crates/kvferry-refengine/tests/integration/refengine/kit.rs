//! Runs an engine until there is no work.

pub(crate) use crate::basics::{Random, config, dense, hybrid, models, windowed};
pub(crate) use kvferry_refengine::pair::{Outputs, prompt};
use kvferry_refengine::{Connector, Engine, EngineConfig, Request, continuation};

pub(crate) fn engine(config: EngineConfig) -> Engine {
    Engine::new(config, Connector::None).unwrap()
}

/// Steps until there is no work.
pub(crate) fn run(engine: &mut Engine) -> Outputs {
    let mut outputs = Outputs::default();
    for _ in 0..100_000 {
        if !engine.has_work() {
            return outputs;
        }
        engine.step().unwrap();
        outputs.add(engine.take_outputs());
    }
    panic!("{engine:?} goes on for ever");
}

/// Submits the requests and runs them. Asserts that their tokens are right and that nothing is left.
pub(crate) fn assert_right(mut engine: Engine, requests: &[Request]) -> Engine {
    for request in requests {
        engine.submit(request.clone()).unwrap();
    }
    let outputs = run(&mut engine);
    for request in requests {
        let right = continuation(&engine.config().model, &request.prompt, request.max_tokens);
        assert_eq!(outputs.of(request.id.as_str()), right, "{}", request.id);
    }
    engine.check_empty().unwrap();
    engine
}

pub(crate) fn requests(count: u64, prompt_len: usize, max_tokens: usize) -> Vec<Request> {
    (0..count)
        .map(|n| Request::new(format!("r{n}"), prompt(n, prompt_len + n as usize), max_tokens))
        .collect()
}
