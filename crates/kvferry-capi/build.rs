//! The name under which programs find the library. It stays loaded: its threads run until the process ends.
//!
//! Symbols have no version (`KVFERRY_0`): rustc gives the linker a version script of its own, without a name. Beside it, GNU
//! ld refuses a second one, and lld ignores it. The prefix `kvferry_` and the soname keep the symbols apart instead.

fn main() {
    // A sanitizer's functions are in the program.
    let is_sanitized = std::env::var_os("CARGO_CFG_SANITIZE").is_some();
    let unresolved = if is_sanitized { "-z,undefs" } else { "-z,defs" };
    for arg in ["-soname,libkvferry.so.0", "-z,nodelete", unresolved] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{arg}");
    }
    // Dependencies export functions of their own where another crate of the workspace has them do so. The linker of the
    // wheel to publish does not know the argument; it links nothing but this crate and what it needs.
    if std::env::var("KVFERRY_LINKER").as_deref() != Ok("zig") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
    println!("cargo::rerun-if-env-changed=KVFERRY_LINKER");
    println!("cargo::rerun-if-changed=build.rs");
}
