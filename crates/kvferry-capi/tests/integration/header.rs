//! The headers in include/ are what is generated from the source.

use cbindgen::{Builder, Config};
use std::path::{Path, PathBuf};

/// The header that the sources make.
fn generated(config: &str, sources: &[&str]) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = Config::from_file(folder.join(config)).expect("the configuration is in the crate");
    let builder = Builder::new().with_config(config);
    let with = |builder: Builder, name: &&str| builder.with_src(folder.join("src").join(name));
    let bindings = sources.iter().fold(builder, with).generate().expect("the source can be parsed");
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).expect("a header is text");
    // What Rust calls safety is said in the text above it, in words of C.
    without_safety(&text)
}

/// Drops the sections that are for Rust: from `# Safety` to the end of the comment.
fn without_safety(text: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    let mut skips = false;
    for line in text.lines() {
        let is_comment = line.trim_start().starts_with("//");
        if is_comment && line.trim_start_matches(['/', ' ']).starts_with("# Safety") {
            skips = true;
            if lines.last().is_some_and(|last| last.trim_start_matches(['/', ' ']).is_empty()) {
                lines.pop();
            }
        }
        skips &= is_comment;
        if !skips {
            lines.push(line);
        }
    }
    lines.join("\n") + "\n"
}

/// Names the functions as libtransfer_engine.so does.
fn without_prefix(text: &str) -> String {
    const PREFIX: &str = "kvferry_mooncake_";
    let indent = " ".repeat(PREFIX.len());
    let mut follows = false;
    let line = |line: &str| {
        let shorter = line.replace(PREFIX, "");
        let shorter =
            if follows { shorter.strip_prefix(&indent) } else { None }.unwrap_or(&shorter);
        follows = (follows || line.contains(PREFIX)) && !line.ends_with(';');
        shorter.to_owned() + "\n"
    };
    text.lines().map(line).collect()
}

fn compare(name: &str, text: &str) {
    let file: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("include").join(name);
    if std::env::var_os("KVFERRY_WRITE_HEADERS").is_some() {
        std::fs::write(&file, text).expect("the header can be written");
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        kept == text,
        "include/{name} is not what the source makes: run the test with KVFERRY_WRITE_HEADERS=1"
    );
}

#[test]
fn kvferry_h_is_what_the_source_makes() {
    let sources = [
        "failure.rs",
        "error.rs",
        "handles.rs",
        "log.rs",
        "agent.rs",
        "region.rs",
        "peer.rs",
        "batch.rs",
        "transfer.rs",
        "notification.rs",
        "file.rs",
    ];
    compare("kvferry.h", &generated("cbindgen-kvferry.toml", &sources));
}

#[test]
fn kvferry_tasks_h_is_what_the_source_makes() {
    let sources = ["tasks/endpoint.rs", "tasks/send.rs", "tasks/receive.rs"];
    compare("kvferry_tasks.h", &generated("cbindgen-kvferry-tasks.toml", &sources));
}

#[test]
fn kvferry_transfer_engine_h_is_what_the_source_makes() {
    let sources = ["transfer_engine.rs", "transfer_engine_tasks.rs"];
    let text = without_prefix(&generated("cbindgen-transfer-engine.toml", &sources));
    compare("kvferry_transfer_engine.h", &text);
}
