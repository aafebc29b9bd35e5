use super::frame::*;
use super::*;
use std::net::TcpListener;
use std::sync::mpsc::channel;

fn frames(bytes: &[u8]) -> Vec<String> {
    let mut reader = FrameReader::new(bytes);
    let mut seen = Vec::new();
    while let Some(frame) = reader.next().unwrap() {
        seen.push(match frame {
            Frame::Facts { lane, facts } => format!("facts {lane} {facts:?}"),
            Frame::Cell { member, round, values, counts } => {
                format!(
                    "cell {member} {round} {:?} {:?}",
                    values.collect::<Vec<_>>(),
                    counts.collect::<Vec<_>>()
                )
            }
            Frame::Heartbeat => "beat".into(),
            Frame::Ready => "ready".into(),
            Frame::Wish(wish) => format!("{wish:?}"),
            Frame::Resting(number) => format!("resting {number}"),
            Frame::Bye(why) => format!("bye {why}"),
        });
    }
    seen
}

#[test]
fn frames_survive_the_way() {
    let facts = Facts { decode_rows: 3, prefill_rows: 500, replay_us: 77, ..Facts::default() };
    let mut bytes = Vec::new();
    write_facts(&mut bytes, 5, &facts);
    write_ready(&mut bytes);
    write_heartbeat(&mut bytes);
    write_cell(&mut bytes, 2, 9, &[1.5, -0.0, f32::MAX], &[1, 0, 2]);
    write_cell(&mut bytes, 0, 10, &[], &[]);
    let wishes = [(true, false), (false, true), (true, true), (false, false)]
        .map(|(paused, draining)| Wish { number: u64::MAX - 3, node: 7, paused, draining });
    wishes.iter().for_each(|wish| write_wish(&mut bytes, wish));
    write_resting(&mut bytes, 1 << 40);
    write_bye(&mut bytes, "the end");
    let mut expected = vec![
        format!("facts 5 {facts:?}"),
        "ready".into(),
        "beat".into(),
        format!("cell 2 9 [1.5, -0.0, {:?}] [1, 0, 2]", f32::MAX),
        "cell 0 10 [] []".into(),
    ];
    expected.extend(wishes.map(|wish| format!("{wish:?}")));
    expected.extend([format!("resting {}", 1_u64 << 40), "bye the end".into()]);
    assert_eq!(frames(&bytes), expected);
}

#[test]
fn a_stream_that_is_cut_or_strange_is_an_error() {
    let mut bytes = Vec::new();
    write_cell(&mut bytes, 2, 9, &[1.5, 2.5], &[2]);
    for end in 1..bytes.len() {
        assert!(FrameReader::new(&bytes[..end]).next().is_err(), "cut at {end}");
    }
    bytes[0] = 99;
    let error = FrameReader::new(bytes.as_slice()).next().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("kind 99"), "{error}");
    bytes[0] = 2;
    bytes[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = FrameReader::new(bytes.as_slice()).next().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("bytes"), "{error}");
}

/// Two links that are one connection.
fn pair() -> (Arc<Link>, Arc<Link>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let two = listener.accept().unwrap().0;
    let link = |node, streams| Arc::new(Link::new(node, streams).unwrap());
    (link(0, vec![None, Some(one)]), link(1, vec![Some(two), None]))
}

/// A group that was parked would have waited for ever for what nobody reads any more.
#[test]
fn a_reading_thread_that_panics_is_a_loss_with_a_name() {
    let (here, there) = pair();
    let group = Arc::new(GroupShared::new(2, Arc::default()));
    let (sender, heard) = channel();
    let tell = move |node, news| match news {
        News::Ready => std::panic::resume_unwind(Box::new("injected")),
        News::Gone(why) => sender.send((node, why)).unwrap(),
        News::Wish(_) | News::Resting(_) => {}
    };
    let threads = here.listen(&group, &tell).unwrap();
    there.say_ready().unwrap();
    let (node, why) = heard.recv().unwrap();
    assert!(node == 1 && why.contains("panicked") && why.contains("injected"), "{node}: {why}");
    here.close();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
