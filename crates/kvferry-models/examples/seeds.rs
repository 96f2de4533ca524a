//! Writes what each target begins with into a folder of its own: `seeds DIR`.

use kvferry_models::TARGETS;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let dir: PathBuf = std::env::args_os().nth(1).unwrap_or_else(|| "fuzz/corpus".into()).into();
    for target in TARGETS {
        let dir = dir.join(target.name);
        std::fs::create_dir_all(&dir)?;
        for (index, seed) in (target.seeds)().into_iter().enumerate() {
            std::fs::write(dir.join(format!("seed-{index}")), seed)?;
        }
    }
    Ok(())
}
