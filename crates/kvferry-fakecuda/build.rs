//! Names the shared object as the driver's loader expects it, and keeps it in the process: its
//! threads outlive a `dlclose`.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
