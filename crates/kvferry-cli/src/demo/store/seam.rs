//! The demo through another seam: TensorRT-LLM's, whose classes are Python's (`python -m kvferry.trtllm.demo`).

use std::env;
use std::ffi::OsString;
use std::process::Command;

use kvferry_bench::failure::Failure;

use super::StoreArgs;

/// The Python that has kvferry's wheel, if it is not `python3`.
const PYTHON: &str = "KVFERRY_PYTHON";

/// Runs the demo of `kvferry.trtllm`, with its output as this command's.
pub(super) fn tensorrt_llm(args: &StoreArgs) -> Result<(), Failure> {
    if args.prefix_tokens.is_some() {
        return Err(Failure::Usage(
            "--prefix-tokens: the prompts of --seam tensorrt-llm share no prefix".into(),
        ));
    }
    let python = env::var_os(PYTHON).unwrap_or_else(|| OsString::from("python3"));
    let named = python.to_string_lossy();
    let mut probe = Command::new(&python);
    let found = probe.args(["-c", "import kvferry.trtllm"]).output().map_err(|error| {
        Failure::Failed(format!("{named}: {error}: set {PYTHON} to a Python that has kvferry"))
    })?;
    if !found.status.success() {
        let why = String::from_utf8_lossy(&found.stderr);
        let why = why.trim_end().rsplit('\n').next().unwrap_or_default();
        return Err(Failure::Failed(format!(
            "{named} does not have kvferry.trtllm ({why}): install kvferry's wheel there, or set \
             {PYTHON} to a Python that has it"
        )));
    }
    let mut demo = Command::new(&python);
    demo.args(["-m", "kvferry.trtllm.demo"]);
    if let Some(prompts) = args.requests {
        demo.arg("--prompts").arg(prompts.to_string());
    }
    if let Some(directory) = &args.directory {
        demo.arg("--directory").arg(directory);
    }
    if args.json {
        demo.arg("--json");
    }
    let status = demo.status().map_err(|error| Failure::Failed(format!("{named}: {error}")))?;
    match status.code() {
        Some(0) => Ok(()),
        Some(1) => Err(Failure::Check("a run loaded or generated something else".into())),
        _ => Err(Failure::Failed(format!("{named} -m kvferry.trtllm.demo: {status}"))),
    }
}
