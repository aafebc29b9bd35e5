use super::*;

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

/// A host that has said hello and heard the answer, and does nothing more by itself.
fn guest(args: &LinkArgs) -> TcpStream {
    let mut stream = reach(args, &args.master, || Ok(())).unwrap();
    greet(&mut stream, &Hello::of(args), args).unwrap();
    stream
}

/// It was answered that it does not fit, and host 0 ended.
#[test]
fn a_host_that_dies_and_comes_again_takes_its_place() {
    for lives in [false, true] {
        let master = free_port();
        let first = {
            let args = args(3, 0, &master);
            std::thread::spawn(move || Link::connect(&args))
        };
        let mut earlier = Some(guest(&args(3, 1, &master)));
        if !lives {
            earlier = None;
        }
        // The third host comes last: the others wait for it.
        let again = {
            let args = args(3, 1, &master);
            std::thread::spawn(move || Link::connect(&args))
        };
        if let Some(earlier) = &mut earlier {
            // One that was cut off and is still there is told.
            let Letter::NotToday(why) = Letter::read(earlier).unwrap() else { panic!("no word of it") };
            assert!(why.contains("--node-rank 1"), "{why}");
        }
        let last = Link::connect(&args(3, 2, &master)).unwrap();
        let links = [first.join().unwrap().unwrap(), again.join().unwrap().unwrap(), last];
        for (node, link) in links.iter().enumerate() {
            assert_eq!((link.node(), link.peers.iter().flatten().count()), (node, 2));
        }
    }
}

#[test]
fn a_host_that_came_and_died_is_counted_as_missing_and_the_others_are_told() {
    let master = free_port();
    let first = {
        let args = LinkArgs { patience: Duration::from_secs(1), ..args(3, 0, &master) };
        std::thread::spawn(move || Link::connect(&args))
    };
    drop(guest(&args(3, 1, &master)));
    let second = Link::connect(&args(3, 2, &master)).expect_err("host 1 is gone").to_string();
    let first = first.join().unwrap().expect_err("host 1 is gone").to_string();
    for error in [first, second] {
        assert!(error.contains("1 of 3 hosts have not come"), "{error}");
    }
}

/// Others waited for it until their patience was over.
#[test]
fn a_host_that_dies_while_the_others_meet_is_named_at_once() {
    let master = free_port();
    let others: Vec<_> = [0, 1]
        .into_iter()
        .map(|node| {
            let args = args(3, node, &master);
            std::thread::spawn(move || Link::connect(&args))
        })
        .collect();
    let mut dying = guest(&args(3, 2, &master));
    // It is told where the others are, and does not go there.
    assert!(matches!(Letter::read(&mut dying).unwrap(), Letter::Places(_)));
    drop(dying);
    for (node, other) in others.into_iter().enumerate() {
        let error = other.join().unwrap().expect_err("host 2 is gone");
        let is_due = match node {
            0 => matches!(error, LinkError::Gone { node: 2, .. }),
            _ => matches!(&error, LinkError::SentAway { why } if why.contains("host 2 went away")),
        };
        assert!(is_due, "host {node}: {error}");
    }
}

#[test]
fn a_first_host_that_dies_is_named_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let master = listener.local_addr().unwrap().to_string();
    for says_places in [false, true] {
        let other = {
            let args = args(3, 1, &master);
            std::thread::spawn(move || Link::connect(&args))
        };
        let (mut stream, _) = listener.accept().unwrap();
        let hello = Hello::read(&mut stream).unwrap().unwrap();
        assert_eq!(hello.node, 1);
        stream.write_all(&Hello::of(&args(3, 0, &master)).bytes()).unwrap();
        if says_places {
            // Then it waits for host 2, which does not come.
            Letter::Places(String::new()).send(&mut stream).unwrap();
        }
        drop(stream);
        let error = other.join().unwrap().expect_err("host 0 is gone");
        assert!(matches!(error, LinkError::Gone { node: 0, .. }), "{error}");
    }
}
