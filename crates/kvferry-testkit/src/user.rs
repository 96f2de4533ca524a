//! Another user of this host.

use std::net::{Ipv4Addr, TcpListener};
use std::thread;

/// Runs `make` on a thread of another user of this host, whose sockets the kernel takes for that user's; also
/// those of the threads that it starts. `None`, with a line that says so, where there is no other user or the
/// kernel does not tell whose a connection is.
///
/// # Panics
/// If `make` panics.
pub fn as_another_user<T: Send>(what: &str, make: impl FnOnce() -> T + Send) -> Option<T> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let told = kvferry_sys::owner::Owners::new(listener.local_addr().expect("bound"));
    if kvferry_sys::unix::user() != 0 || told.is_err() {
        println!("SKIPPED: {what}: needs root, and a kernel with INET_DIAG");
        return None;
    }
    let becoming = move || {
        let keep = -1;
        // SAFETY: changes the user of this thread alone.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, keep, 65_534, keep) };
        assert_eq!(rc, 0, "root becomes another user");
        make()
    };
    thread::scope(|scope| Some(scope.spawn(becoming).join().expect("no panic")))
}

/// Runs `make` on a thread whose files the kernel gives to another user of this host, as NFS does with a superuser's
/// (`root_squash`); also those of the threads that it starts. `None`, with a line that says so, without root.
///
/// # Panics
/// If `make` panics.
pub fn with_files_of_another_user<T: Send>(
    what: &str,
    make: impl FnOnce() -> T + Send,
) -> Option<T> {
    if kvferry_sys::unix::user() != 0 {
        println!("SKIPPED: {what}: needs root");
        return None;
    }
    let becoming = move || {
        for _ in 0..2 {
            // SAFETY: changes the user of this thread alone, for files. Returns the one before.
            let before = unsafe { libc::syscall(libc::SYS_setfsuid, 65_534) };
            assert!(before == 0 || before == 65_534);
        }
        make()
    };
    thread::scope(|scope| Some(scope.spawn(becoming).join().expect("no panic")))
}
