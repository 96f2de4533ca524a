//! Engines whose KV caches are in memory of GPUs, on the fake driver.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Pair, bounded, config, kvferry_adapter, models, node, prompt,
};
use kvferry_fakecuda::control::{Fake, library_path};
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;

#[test]
fn engines_with_caches_on_gpus_decode_the_tokens_of_the_model() {
    let _watched = bounded();
    // SAFETY: nothing has looked for the driver yet, and no other test looks for one.
    unsafe { std::env::set_var("KVFERRY_LIBCUDA", library_path()) };
    let fake = Fake::load(&library_path()).expect("the fake driver loads");
    for model in models() {
        for flow in Flow::ALL {
            let config = config(&model, 8, 64);
            let node = |gpu| node(&config, &KvferryAdapterConfig { gpu, ..kvferry_adapter() });
            // In one flow, the prefill engine has its cache in memory of the host.
            let prefill = if flow == Flow::ProducerFirst { None } else { Some(0) };
            let mut pair = Pair::of(flow, node(prefill), node(Some(1)));
            pair.hand_off("a", prompt(1, 30), 3);
            pair.hand_off("b", prompt(2, 17), 3);
            pair.finish(&["a", "b"]);
            assert_eq!(pair.decode.computed, 2 * 3, "{flow:?}: something was not fetched");
        }
    }
    assert_eq!(fake.findings(), Vec::<String>::new());
}
