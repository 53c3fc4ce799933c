// Command load puts load on a JetStream server for a while and prints what it took as one line of JSON.
//
// Bodies have 1 KiB, the stream is kept in files with one replica. What ends in the warm-up is not counted.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	bodyBytes = 1024
	subject   = "load.messages"
	stream    = "LOAD"
	// Longest wait for any single answer.
	patience = 30 * time.Second
)

// window is the time that counts.
type window struct{ from, until time.Time }

func (w window) over() bool                  { return !time.Now().Before(w.until) }
func (w window) holds(moment time.Time) bool { return !moment.Before(w.from) && moment.Before(w.until) }

// tally is what happened within the window.
type tally struct {
	sync.Mutex
	messages int
	waits    []time.Duration
}

func (t *tally) add(w window, messages int, wait time.Duration) {
	if w.holds(time.Now()) {
		t.Lock()
		t.messages += messages
		t.waits = append(t.waits, wait)
		t.Unlock()
	}
}

func main() {
	server := flag.String("server", "nats://127.0.0.1:4222", "where the server listens")
	mode := flag.String("mode", "publish", "first: one publish; publish: each publisher waits for its answer; "+
		"async: many under way at once; fetch: read and acknowledge")
	count := flag.Int("count", 64, "publishers, publishes under way, or messages in a fetch")
	seconds := flag.Float64("seconds", 3, "how long to measure")
	warmUp := flag.Float64("warm-up", 0.5, "how long to run before")
	flag.Parse()
	if err := run(*server, *mode, *count, *warmUp, *seconds); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(server, mode string, count int, warmUp, seconds float64) error {
	connection, err := nats.Connect(server)
	if err != nil {
		return err
	}
	defer connection.Close()
	js, err := jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(count))
	if err != nil {
		return err
	}
	ctx := context.Background()
	setUp, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	config := jetstream.StreamConfig{Name: stream, Subjects: []string{subject}, Storage: jetstream.FileStorage}
	if _, err := js.CreateOrUpdateStream(setUp, config); err != nil {
		return err
	}
	body := bytes.Repeat([]byte("holdfast"), bodyBytes/8)
	if mode == "first" {
		_, err := js.Publish(setUp, subject, body)
		return err
	}
	from := time.Now().Add(time.Duration(warmUp * float64(time.Second)))
	measured := window{from, from.Add(time.Duration(seconds * float64(time.Second)))}
	var done tally
	switch mode {
	case "publish":
		err = publish(ctx, js, body, count, measured, &done)
	case "async":
		err = publishAsync(js, body, count, measured, &done)
	case "fetch":
		err = fetch(ctx, js, count, measured, &done)
	default:
		err = fmt.Errorf("there is no mode %q", mode)
	}
	if err != nil {
		return err
	}
	return report(&done, seconds)
}

// publish runs publishers that each wait for the answer before the next message.
func publish(ctx context.Context, js jetstream.JetStream, body []byte, count int, w window, done *tally) error {
	failures := make(chan error, count)
	for range count {
		go func() {
			for !w.over() {
				begun := time.Now()
				limited, cancel := context.WithTimeout(ctx, patience)
				_, err := js.Publish(limited, subject, body)
				cancel()
				if err != nil {
					failures <- err
					return
				}
				done.add(w, 1, time.Since(begun))
			}
			failures <- nil
		}()
	}
	var all []error
	for range count {
		all = append(all, <-failures)
	}
	return errors.Join(all...)
}

type underWay struct {
	answer jetstream.PubAckFuture
	begun  time.Time
}

// publishAsync keeps count publishes under way and takes their answers in order.
func publishAsync(js jetstream.JetStream, body []byte, count int, w window, done *tally) error {
	queue := make(chan underWay, count)
	ended := make(chan error, 1)
	go func() {
		var first error
		for one := range queue {
			select {
			case <-one.answer.Ok():
				done.add(w, 1, time.Since(one.begun))
			case err := <-one.answer.Err():
				first = errors.Join(first, err)
			case <-time.After(patience):
				first = errors.Join(first, errors.New("a publish was not answered"))
			}
			if first != nil {
				break
			}
		}
		ended <- first
	}()
	for !w.over() {
		begun := time.Now()
		answer, err := js.PublishAsync(subject, body, jetstream.WithStallWait(patience))
		if err != nil {
			return err
		}
		select {
		case queue <- underWay{answer, begun}:
		case err := <-ended:
			return err
		}
	}
	close(queue)
	return <-ended
}

// fetch reads the stream from its start with a pull consumer, over and over, acknowledging every message.
func fetch(ctx context.Context, js jetstream.JetStream, count int, w window, done *tally) error {
	for !w.over() {
		setUp, cancel := context.WithTimeout(ctx, patience)
		consumer, err := js.CreateConsumer(setUp, stream, jetstream.ConsumerConfig{
			AckPolicy:     jetstream.AckExplicitPolicy,
			MaxAckPending: 16 * count,
		})
		cancel()
		if err != nil {
			return err
		}
		for !w.over() {
			begun := time.Now()
			batch, err := consumer.Fetch(count, jetstream.FetchMaxWait(time.Second))
			if err != nil {
				return err
			}
			messages := 0
			for message := range batch.Messages() {
				if err := message.Ack(); err != nil {
					return err
				}
				messages++
			}
			if err := batch.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
				return err
			}
			if messages < count {
				break
			}
			done.add(w, messages, time.Since(begun))
		}
		clean, cancel := context.WithTimeout(ctx, patience)
		err = js.DeleteConsumer(clean, stream, consumer.CachedInfo().Name)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

func report(done *tally, seconds float64) error {
	if done.messages == 0 {
		return errors.New("nothing ended within the measured time")
	}
	slices.Sort(done.waits)
	at := func(part float64) float64 {
		place := min(int(part*float64(len(done.waits))), len(done.waits)-1)
		return done.waits[place].Seconds() * 1e3
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"messages_per_second": float64(done.messages) / seconds,
		"p50_ms":              at(0.5),
		"p99_ms":              at(0.99),
	})
}
