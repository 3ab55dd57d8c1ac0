package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"decode/decoder"
)

// anyToken stands for a token that is not compared.
const anyToken = -1

// probeRun is a line of a probe file.
type probeRun struct {
	name   string
	run    run
	expect [][]int64 // after the prompt and after each followed token, for each sequence
}

// probeResult is the line that follows those of the calls of a run.
type probeResult struct {
	Run    string    `json:"run"`
	Tokens [][]int64 `json:"tokens"`
	Error  *string   `json:"error"`
}

// readProbe reads the runs of a probe file: on each line the arguments of one, with a space between them.
func readProbe(file string) ([]probeRun, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var runs []probeRun
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSuffix(line, "\r")
		if line == "" {
			continue
		}
		probed, err := parseProbe(line)
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", file, i+1, err)
		}
		runs = append(runs, probed)
	}
	if len(runs) == 0 {
		return nil, fmt.Errorf("there is no run in %s", file)
	}
	return runs, nil
}

func parseProbe(line string) (probeRun, error) {
	var probed probeRun
	flags := flag.NewFlagSet("probe", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&probed.name, "run", "", "")
	flags.Func("expect", "", rows(&probed.expect))
	probed.run.define(flags)
	if err := flags.Parse(strings.Split(line, " ")); err != nil {
		return probed, err
	}
	if flags.NArg() > 0 {
		return probed, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if probed.name == "" {
		return probed, errors.New("--run is missing")
	}
	if err := probed.run.check(); err != nil {
		return probed, err
	}
	if len(probed.expect) != len(probed.run.prompts) {
		return probed, errors.New("--expect is given once for each prompt")
	}
	for _, tokens := range probed.expect {
		if len(tokens) != probed.run.steps()+1 {
			return probed, errors.New("--expect has one id more than --follow")
		}
	}
	return probed, nil
}

// probe decodes each run, and adds its calls and its tokens to a file. It says whether all tokens are the expected ones.
func probe(d *decoder.Decoder, runs []probeRun, file string) (bool, error) {
	asExpected := true
	for _, probed := range runs {
		d.TraceTo(file, probed.name)
		result, verdict := probeResult{Run: probed.name, Tokens: [][]int64{}}, "as expected"
		tokens, err := probed.decode(d)
		if err != nil {
			message := err.Error()
			result.Error, verdict = &message, "error: "+message
		} else {
			result.Tokens = tokens
			if wrong := probed.difference(tokens); wrong != "" {
				verdict = wrong
			}
		}
		asExpected = asExpected && verdict == "as expected"
		if err := decoder.AppendLine(file, result); err != nil {
			return false, err
		}
		fmt.Printf("%s: %s\n", probed.name, verdict)
	}
	return asExpected, nil
}

func (p *probeRun) decode(d *decoder.Decoder) ([][]int64, error) {
	d.Reset()
	if err := p.run.encode(d); err != nil {
		return nil, err
	}
	return p.run.decode(d, func() {})
}

// difference is the first token that is not the expected one, in words; empty where all are.
func (p *probeRun) difference(made [][]int64) string {
	for i, tokens := range p.expect {
		for step, expected := range tokens {
			if got := made[i][step]; expected != anyToken && got != expected {
				return fmt.Sprintf("sequence %d, step %d: token %d in place of %d", i, step, got, expected)
			}
		}
	}
	return ""
}
