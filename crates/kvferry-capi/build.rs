//! The name under which programs find the library. It stays loaded: its threads run until the process ends.

fn main() {
    for arg in ["-soname,libkvferry.so.0", "-z,nodelete", "-z,defs"] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{arg}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
