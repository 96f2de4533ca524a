//! Code of the program that the agent calls: handlers of messages, wakers, callbacks.

use super::*;

/// Takes longer for each message of a flood than the control thread may stay with a session.
struct SlowHandler {
    order: Mutex<Vec<Vec<u8>>>,
    /// Gets a message when the handler has the first one; the handler returns once `go` has one.
    first: mpsc::Sender<()>,
    go: Mutex<mpsc::Receiver<()>>,
}

impl MessageHandler for SlowHandler {
    fn began(&self, _: &Channel) {}

    fn received(&self, _: &Channel, message: Message<'_>) {
        let is_alone = {
            let mut order = self.order.lock().expect("no panic");
            order.push(message.to_vec());
            !order.iter().any(|message| message == b"other")
        };
        match &*message {
            b"first" => {
                self.first.send(()).expect("the test waits");
                let go = self.go.lock().expect("no panic");
                go.recv_timeout(PATIENCE).expect("the test goes on");
            }
            b"flood" if is_alone => thread::sleep(Duration::from_millis(20)),
            _ => {}
        }
    }

    fn ended(&self, _: &Channel, _: &Error) {}
}

/// The number of messages that are handled before the one of another session, all of which are sent while the control
/// thread handles a first one.
fn handled_before_the_other(flood_len: usize) -> usize {
    let (flooding, other, far) = (one_thread_agent(), one_thread_agent(), one_thread_agent());
    let ((first, is_first), (tell, go)) = (mpsc::channel(), mpsc::channel());
    let handler = Arc::new(SlowHandler { order: Mutex::default(), first, go: Mutex::new(go) });
    far.set_message_handler(Arc::clone(&handler) as Arc<dyn MessageHandler>).expect("the first");
    let channel_of = |agent: &Agent| {
        let peer = agent.peer(far.advertised()).expect("an address");
        peer.channel(PATIENCE).expect("it is there")
    };
    let (flood, others) = (channel_of(&flooding), channel_of(&other));
    flood.send(b"first".to_vec()).expect("queued");
    is_first.recv_timeout(PATIENCE).expect("it is being handled");
    // While the control thread is busy, all of these reach its sockets, the flood first.
    for _ in 0..flood_len {
        flood.send(b"flood".to_vec()).expect("queued");
    }
    others.send(b"other".to_vec()).expect("queued");
    tell.send(()).expect("the handler waits");
    let order = || handler.order.lock().expect("no panic").clone();
    eventually("all messages are handled", || order().len() == flood_len + 2);
    order().iter().take_while(|message| *message != b"other").count()
}

#[test]
fn a_session_whose_messages_are_slow_to_handle_does_not_hold_the_other_sessions_up() {
    const FLOOD: usize = 60;
    let _bound = bounded();
    // The other message may arrive late on a busy machine. One that has to wait for the flood is the last in every try.
    let last = (0..6).take_while(|_| handled_before_the_other(FLOOD) > FLOOD).count();
    assert!(last < 6, "the message of the other session came last, {last} times");
}

/// Panics at each message.
struct PanickingHandler;

impl MessageHandler for PanickingHandler {
    fn began(&self, _: &Channel) {}

    fn received(&self, _: &Channel, message: Message<'_>) {
        panic!("a panic of a message handler at {} bytes", message.len());
    }

    fn ended(&self, _: &Channel, _: &Error) {
        panic!("a panic of a message handler");
    }
}

#[test]
fn a_message_handler_that_panics_ends_its_session_and_no_other() {
    let _bound = bounded();
    let (near, far, other) = (one_thread_agent(), one_thread_agent(), one_thread_agent());
    far.set_message_handler(Arc::new(PanickingHandler)).expect("the first");
    healthy_write(&other, &far, "nothing");
    let peer = near.peer(far.advertised()).expect("an address");
    let channel = peer.channel(PATIENCE).expect("it is there");
    channel.send(b"boo".to_vec()).expect("queued");
    let began = Instant::now();
    while channel.end().is_none() {
        assert!(began.elapsed() < PATIENCE, "the session goes on");
        thread::sleep(Duration::from_millis(1));
    }
    healthy_write(&near, &far, "a panic of the peer's message handler");
    healthy_write(&other, &far, "a panic of the peer's message handler");
    assert_eq!(other.stats().sessions_opened, 1, "its session did not end");
}

struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("a panic of a waker");
    }
}

#[test]
fn a_waker_that_panics_does_not_stop_other_transfers() {
    let _bound = bounded();
    let (near, far) = (one_thread_agent(), one_thread_agent());
    let (device, to) = held_device(&far, 64 * KIB);
    let mut writing = held_write(&near, &far, &device, &to);
    let waker = Arc::new(PanickingWaker).into();
    assert!(Pin::new(&mut writing).poll(&mut Context::from_waker(&waker)).is_pending());
    device.release();
    writing.wait(PATIENCE / 2).expect("it ends").expect("done");
    healthy_write(&near, &far, "a panic of a waker");
}

#[test]
fn a_callback_gets_the_outcome_once_and_may_panic() {
    let _bound = bounded();
    let (near, far) = (one_thread_agent(), one_thread_agent());
    let (device, to) = held_device(&far, 64 * KIB);
    let writing = held_write(&near, &far, &device, &to);
    let (sender, outcomes) = mpsc::channel();
    let late = sender.clone();
    writing.on_end(|_| panic!("a panic of a callback"));
    writing.on_end(move |outcome| sender.send(outcome.is_ok()).expect("the test waits"));
    assert!(outcomes.try_recv().is_err(), "it has not ended");
    device.release();
    assert_eq!(outcomes.recv_timeout(PATIENCE / 2), Ok(true));
    // After the end: at once, on this thread.
    writing.on_end(move |outcome| late.send(outcome.is_ok()).expect("the test waits"));
    assert_eq!(outcomes.try_recv(), Ok(true));
    assert!(outcomes.try_recv().is_err(), "each callback is called once");
    healthy_write(&near, &far, "a panic of a callback");
}

/// Asks for the outcome again in each callback, as one that tries again after each error does.
fn ask_again(transfer: Arc<kvferry::Transfer>, times: u32, end: std::sync::mpsc::Sender<()>) {
    let next = Arc::clone(&transfer);
    transfer.on_end(move |_| {
        if times == 0 {
            end.send(()).expect("the test waits");
        } else {
            ask_again(next, times - 1, end);
        }
    });
}

#[test]
fn callbacks_that_start_further_ones_do_not_nest() {
    let _bound = bounded();
    let (near, far) = (one_thread_agent(), one_thread_agent());
    let (device, to) = held_device(&far, 64 * KIB);
    let writing = held_write(&near, &far, &device, &to);
    device.release();
    writing.wait(PATIENCE / 2).expect("it ends").expect("done");
    let transfer = Arc::new(writing);
    let (sender, end) = std::sync::mpsc::channel();
    ask_again(Arc::clone(&transfer), 100_000, sender.clone());
    end.recv_timeout(PATIENCE).expect("each is called once");
    near.shutdown();
    ask_again(transfer, 100_000, sender);
    end.recv_timeout(PATIENCE).expect("each is called once, after a shutdown, too");
}

#[test]
fn a_shutdown_ends_a_transfer_with_its_callback() {
    let _bound = bounded();
    let (near, far) = (one_thread_agent(), one_thread_agent());
    let (device, to) = held_device(&far, 64 * KIB);
    let writing = held_write(&near, &far, &device, &to);
    let (sender, outcomes) = mpsc::channel();
    writing.on_end(move |outcome| sender.send(kind(outcome)).expect("the test waits"));
    near.shutdown();
    assert_eq!(outcomes.recv_timeout(PATIENCE / 2), Ok(ErrorKind::Shutdown));
    device.release();
}
