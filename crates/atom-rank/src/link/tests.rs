use super::frame::*;
use super::*;
use std::net::TcpListener;

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
    write_bye(&mut bytes, "the end");
    let expected = [
        format!("facts 5 {facts:?}"),
        "ready".into(),
        "beat".into(),
        format!("cell 2 9 [1.5, -0.0, {:?}] [1, 0, 2]", f32::MAX),
        "cell 0 10 [] []".into(),
        "bye the end".into(),
    ];
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

fn args(nodes: usize, node: usize, master: &str) -> LinkArgs {
    let patience = Duration::from_secs(60);
    LinkArgs { nodes, node, master: master.into(), fingerprint: 7, patience }
}

/// A port that nobody uses.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

fn connect(all: Vec<LinkArgs>) -> Vec<Result<Link, LinkError>> {
    let threads: Vec<_> =
        all.into_iter().map(|args| std::thread::spawn(move || Link::connect(&args))).collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn hosts_that_start_in_any_order_all_meet() {
    for nodes in [2, 4] {
        let master = free_port();
        let links = connect((0..nodes).rev().map(|node| args(nodes, node, &master)).collect());
        for (link, node) in links.into_iter().zip((0..nodes).rev()) {
            let link = link.unwrap();
            assert_eq!((link.node(), link.nodes()), (node, nodes));
            assert_eq!(link.peers.iter().flatten().count(), nodes - 1);
            assert_eq!(link.lanes(8).len(), 8 / nodes);
        }
    }
}

#[test]
fn hosts_that_do_not_fit_refuse_each_other() {
    let master = free_port();
    let other = LinkArgs { fingerprint: 8, ..args(2, 1, &master) };
    for result in connect(vec![args(2, 0, &master), other]) {
        let error = result.expect_err("refused").to_string();
        assert!(error.contains("does not fit") && error.contains("0x0000000000000008"), "{error}");
    }
}

#[test]
fn a_host_that_stays_away_is_counted() {
    let master = free_port();
    let alone = LinkArgs { patience: Duration::from_millis(80), ..args(3, 0, &master) };
    let error = Link::connect(&alone).expect_err("nobody came").to_string();
    assert!(error.contains("2 of 3 hosts have not come"), "{error}");
    let lost = LinkArgs { patience: Duration::from_millis(80), ..args(3, 2, &master) };
    assert!(Link::connect(&lost).expect_err("nobody is there").to_string().contains(&master));
}
