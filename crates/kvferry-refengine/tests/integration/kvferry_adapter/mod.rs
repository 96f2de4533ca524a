//! kvferry's connector in the reference engine, over real agents of one process: a prefill and a
//! decode engine, whose tokens are compared with the model's output without an engine.

mod endings;
mod failures;
mod flows;
mod gpus;
mod invented;
mod kit;
mod scenarios;
mod shapes;
